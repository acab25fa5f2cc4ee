"""`tresnet split`: share images between train and val."""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from tyro.conf import Positional, arg

from tresnet.cli.output import say


def split(
    source: Annotated[Positional[Path], arg(metavar="DIR|FILE.csv")],
    *,
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
    label_separator: str | None = None,
) -> int:
    """Write train.csv and val.csv, which have the same fraction of each class's images.

    They name the images where they are: nothing is copied. train.py --data takes their directory.

    Args:
        source: Folder with a folder of images for each class, or a CSV file of labels: with the
            header image,label or image,labels, or with a column of 0 and 1 for each class.
        val_fraction: Fraction of the images to validate on.
        seed: Seed of the choice of images.
        label_separator: Text between the names in the column `labels`. None: a semicolon.
    """
    from tresnet.data.splitting import write_splits

    options = val_fraction, seed, label_separator
    for name, count in write_splits(source, *options).items():
        folder = source if source.is_dir() else source.parent
        say(f"{folder / name}.csv: {count} images")
    return 0
