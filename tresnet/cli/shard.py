"""`tresnet shard`: write images as a data set of Hugging Face `datasets`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import say
from tresnet.settings import DataOptions, ShardSettings
from tresnet.settings.fields import CountOrZero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(ShardSettings, DataOptions):
    """Write images in few large files, as a data set that `datasets` and train.py read."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """The data set, as for --data of train.py."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """New directory, which appears complete or not at all."""
    splits: tuple[str, ...] = ("train", "val")
    """Names of the splits to write. The split val gets the usual name validation."""
    multilabel: bool = False
    """Images have any number of labels, listed in train.csv and val.csv or in COCO's JSON."""
    skip_bad_images: bool = False
    """Leave out images that cannot be decoded, instead of stopping."""
    workers: CountOrZero = 0
    """Number of processes that write. 0: one per core."""

    def run(self, argv: list[str]) -> int:
        """Write the splits, and print how many images each has."""
        from tresnet.cores import usable_cores
        from tresnet.data.shards import write_shards
        from tresnet.data.sources import fetch, open_split

        source, workers = fetch(self.data), self.workers or usable_cores()
        splits, first = {}, None
        for name in self.splits:
            splits["validation" if name == "val" else name] = split = open_split(
                source,
                name,
                multi=self.multilabel or None,
                skip_bad_images=self.skip_bad_images,
                options=self,
                workers=workers,
                like=first,
            )
            first = first or split.labels
        written = write_shards(splits, self.out, self, workers=workers)
        for name, split in splits.items():
            reading = f" ({split.labels.reading})" if split.labels.reading else ""
            say(
                f"{self.out / name}: {written[name]} images, {len(split.classes)} classes"
                f"{reading}, {len(split) - written[name]} unreadable left out"
            )
        return 0
