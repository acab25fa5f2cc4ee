"""`tresnet shard`: write a data set of images into a few large files."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import progress, say
from tresnet.errors import DataError, WriteError
from tresnet.settings import ShardSettings
from tresnet.settings.fields import CountOrZero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(ShardSettings):
    """Write the images of a data set into shards, which train.py and eval.py accept as --data.

    The splits train and val are written if they exist. After an interruption, the same command
    keeps complete shards and continues.
    """

    data: Annotated[Positional[Path], arg(metavar="DATA")]
    """Folder of the data set, as for --data of train.py."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """Folder for the shards; it is created if needed."""
    multilabel: bool = False
    """Images have any number of labels, listed in train.csv and val.csv or in COCO's JSON."""
    skip_bad_images: bool = False
    """Leave out images that cannot be decoded, instead of stopping."""
    workers: CountOrZero = 0
    """Number of processes that write shards. 0: one per core."""

    def run(self, argv: list[str]) -> int:
        """Write the splits, and print how many images each has."""
        from tresnet.data.folder import open_folder
        from tresnet.data.loaders import usable_cores
        from tresnet.data.multilabel import label_file, open_multilabel
        from tresnet.data.shards import manifest_path, write_shards

        opener = open_multilabel if self.multilabel else open_folder
        splits = [
            name
            for name in ("train", "val")
            if (self.data / name).exists() or (self.multilabel and label_file(self.data, name))
        ]
        if not splits:
            raise DataError(
                "expected a folder train or val, or with --multilabel train.csv or val.csv, in "
                f"{self.data}, but none is there"
            )
        if self.out.resolve() == self.data.resolve():
            raise WriteError(f"expected another folder to write than {self.data}, got the same")
        datasets = [opener(self.data, name, None, self.skip_bad_images) for name in splits]
        for dataset in datasets:
            skipped = write_shards(
                dataset,
                self.data,
                self.out,
                ShardSettings(**self.values(ShardSettings)),
                workers=self.workers or usable_cores(),
                log=progress,
            )
            for name, reason in skipped.items():
                progress(f"left out {name}: {reason}")
            say(
                f"{manifest_path(self.out, dataset.split)}: {len(dataset) - len(skipped)} images, "
                f"{len(dataset.classes)} classes, {len(skipped)} left out"
            )
        return 0
