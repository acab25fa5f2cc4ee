"""`tresnet shard`: a folder of images as a few large files."""

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
    """Write a data set's images into shards, which train.py and eval.py accept as --data.

    Both splits are written, train and val, if they exist. Started again, the command keeps complete
    shards and continues.
    """

    data: Annotated[Positional[Path], arg(metavar="DATA")]
    """The folder of the data set, as for train.py."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """The folder to write; it is created."""
    multilabel: bool = False
    """Images have any number of labels, in the files of the recipe multilabel."""
    skip_bad_images: bool = False
    """Leave out images that cannot be decoded, instead of stopping."""
    workers: CountOrZero = 0
    """Processes that read and write; 0 for one per core."""

    def run(self, argv: list[str]) -> int:
        """Write every split."""
        from tresnet.data.folder import open_folder
        from tresnet.data.loaders import usable_cores
        from tresnet.data.multilabel import open_multilabel
        from tresnet.data.shards import manifest_path, write_shards

        opener = open_multilabel if self.multilabel else open_folder
        splits = [name for name in ("train", "val") if (self.data / name).exists()]
        if not splits:
            raise DataError(f"expected a folder train or val in {self.data}, but none is there")
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
