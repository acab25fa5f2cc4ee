"""`tresnet split`: share images between train and val."""

import dataclasses
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from tyro.conf import Positional, arg

from tresnet.cli.output import say
from tresnet.settings.fields import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Settings):
    """Write train.csv and val.csv, which have the same fraction of each class's images.

    They name the images where they are: nothing is copied. train.py --data takes their directory.
    """

    source: Annotated[Positional[Path], arg(metavar="DIR|FILE.csv")]
    """Folder with a folder of images for each class, or a CSV file of labels: with the header
    image,label or image,labels, or with a column of 0 and 1 for each class."""
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the images to validate on."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the choice of images."""
    label_separator: str | None = None
    """Text between the names in the column `labels`. None: a semicolon."""

    def run(self, argv: list[str]) -> int:
        """Write both files, and print how many images each lists."""
        from tresnet.data.splitting import write_splits

        options = self.val_fraction, self.seed, self.label_separator
        for split, count in write_splits(self.source, *options).items():
            folder = self.source if self.source.is_dir() else self.source.parent
            say(f"{folder / split}.csv: {count} images")
        return 0
