"""`tresnet shard`: write images as a data set of Hugging Face `datasets`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import say
from tresnet.settings import DataOptions
from tresnet.settings.fields import Count, CountOrZero, JpegQuality


def shard(
    data: Annotated[Positional[str], arg(metavar="DATA")],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    *,
    splits: tuple[str, ...] = ("train", "val"),
    multilabel: bool = False,
    skip_bad_images: bool = False,
    workers: CountOrZero = 0,
    max_side: Count | None = None,
    short_side: Count | None = None,
    quality: JpegQuality = 90,
    pixels: bool = False,
    source: DataOptions,
) -> int:
    """Write images in few large files, as a data set that `datasets` and train.py read.

    Args:
        data: The data set, as for --data of train.py.
        out: New directory, which appears complete or not at all.
        splits: Names of the splits to write. The split val gets the usual name validation.
        multilabel: Images have any number of labels, listed in train.csv and val.csv or in COCO's
            JSON.
        skip_bad_images: Leave out images that cannot be decoded, instead of stopping.
        workers: Number of processes that write. 0: one per core.
        max_side: Shrink images whose longer side has more pixels than this; 500 keeps details.
        short_side: Shrink images whose shorter side has more pixels than this; 256 loads fastest.
        quality: JPEG quality of shrunk images; other images keep their files' bytes.
        pixels: Store uncompressed PPM files, which load without decoding but take ten times the
            space.
    """
    from tresnet.cores import usable_cores
    from tresnet.data.shards import write_shards
    from tresnet.data.sources import fetch, open_split

    folder, workers = fetch(data), workers or usable_cores()
    common = {"skip_bad_images": skip_bad_images, "options": source, "workers": workers}
    opened, first = {}, None
    for name in splits:
        split = open_split(folder, name, multi=multilabel or None, like=first, **common)
        opened["validation" if name == "val" else name] = split
        first = first or split.labels
    options = {"max_side": max_side, "short_side": short_side, "quality": quality}
    written = write_shards(opened, out, workers=workers, pixels=pixels, **options)
    for name, count in written.items():
        split = opened[name]
        reading = f" ({split.labels.reading})" if split.labels.reading else ""
        about = f"{count} images, {len(split.classes)} classes{reading}"
        say(f"{out / name}: {about}, {len(split) - count} unreadable left out")
    return 0
