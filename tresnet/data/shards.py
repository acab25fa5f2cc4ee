"""Write images as a data set of Hugging Face `datasets`, which `open_hf` and other tools read."""

import io
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tresnet.data.dataset import ImageDataset
from tresnet.data.decoding import BadImageError, EncodedImage
from tresnet.errors import ConfigError, DataError, TResNetError, WriteError, needed
from tresnet.settings.fields import Count, JpegQuality, check_call
from tresnet.writing import as_write_error, atomic_directory

logger = logging.getLogger(__name__)

_Encode = Callable[[EncodedImage], bytes]
_BATCH = 64  # images that a process holds before it writes them


def write_shards(
    splits: Mapping[str, ImageDataset],
    out: Path,
    *,
    workers: int = 1,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    pixels: bool = False,
) -> dict[str, int]:
    """Write splits into the new directory `out`, which appears complete or not at all.

    The images keep their order. `workers` processes write temporary files, which need as much
    space as the result, beside `out`. Images are shrunk to `max_side` pixels on the longer side, or
    `short_side` on the shorter, and are then JPEG files of a `quality` from 1 to 100; others keep
    their files' bytes. With `pixels`, all are PPM files. Skipped images are logged. Returns each
    split's image count.

    Raises:
        InputError: a number is out of range.
        ConfigError: both `max_side` and `short_side` are given.
        DataError: an image cannot be decoded, or all images of a split were skipped.
        WriteError: `out` has contents, or cannot be written, for example because the disk is full.
    """
    options = {"max_side": max_side, "short_side": short_side, "quality": quality}
    encode = check_call(partial(_encoder, pixels=pixels, **options))()
    if max_side is not None and short_side is not None:
        raise ConfigError("expected --max-side or --short-side, got both: leave one out")
    with needed("tresnet shard", "hf"):
        import datasets
    with as_write_error(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        empty = not out.exists() or not any(out.iterdir())
    if not empty:
        raise WriteError(f"expected a new or empty directory, got {out}: choose another name")
    try:
        with (
            atomic_directory(out) as folder,
            tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch,
        ):
            written = datasets.DatasetDict(
                {
                    split: _rows(split, dataset, encode, workers, Path(scratch))
                    for split, dataset in splits.items()
                }
            )
            written.save_to_disk(folder)
    except TResNetError:
        raise
    except UnicodeError as error:
        raise WriteError(
            f"expected names in UTF-8, got {str(out)!a} ({error}): choose another name"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: closing the file failed as well
        raise WriteError(f"cannot write {out}: {error}: is the disk full?") from error
    return {str(split): len(rows) for split, rows in written.items()}


def _rows(split: str, images: ImageDataset, encode: _Encode, workers: int, scratch: Path) -> Any:
    """Return the readable images of a split as a `datasets.Dataset`, written below `scratch`."""
    import datasets

    names = datasets.ClassLabel(names=images.classes)
    features = {
        "image": datasets.Image(),
        "label": datasets.List(names) if images.multi else names,
    }
    rows = datasets.Dataset.from_dict({"index": range(len(images))}).map(
        partial(_table, images, encode),
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns="index",
        features=datasets.Features(features),
        num_proc=min(workers, len(images)) if workers > 1 else None,
        cache_file_name=str(scratch / f"{split}.arrow"),
        new_fingerprint=secrets.token_hex(8),  # otherwise `datasets` hashes all paths
        desc=f"write {split}",
    )
    if not len(rows):
        raise DataError(f"expected images in {split}, but all {len(images)} are unreadable")
    return rows


def _table(dataset: ImageDataset, encode: _Encode, batch: dict[str, Any]) -> Any:
    """Return a table of the readable images of a batch, with their labels."""
    import pyarrow

    images: list[dict[str, Any]] = []
    readable: list[int] = []
    for index in map(int, batch["index"]):
        try:
            data = encode(dataset.encoded_image(index))
        except BadImageError as error:
            if not dataset.skip_bad_images:
                raise error.advising_skip() from error
            logger.warning("skipped %s: %s", error.path, error.reason)
            continue
        path = os.fsencode(dataset.paths[index]) if dataset.paths else None
        name = path and os.path.basename(path).decode(errors="replace")  # Arrow's text is UTF-8
        images.append({"bytes": data, "path": name})
        readable.append(index)
    classes = map(dataset.labels.of_image, readable)
    labels = list(classes) if dataset.multi else [label for (label,) in classes]
    # Return a table: in a list, `datasets` drops an image's bytes if `path` is a local file.
    columns = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    return pyarrow.table({"image": pyarrow.array(images, columns), "label": labels})


def _encoder(
    max_side: Count | None, short_side: Count | None, quality: JpegQuality, pixels: bool
) -> _Encode:
    return partial(_shrunk_file, max_side, short_side, quality, pixels)


def _shrunk_file(
    max_side: int | None,
    short_side: int | None,
    quality: int,
    pixels: bool,
    original: EncodedImage,
) -> bytes:
    """Return a PPM file if `pixels`, a JPEG of a shrunk image, else the original file."""
    from PIL import Image

    width, height = original.size
    image = original.rgb()  # also checks that the complete image can be decoded
    factor = 1.0
    if max_side is not None:
        factor = max_side / max(width, height)
    elif short_side is not None:
        factor = short_side / min(width, height)
    if factor < 1:
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    if factor >= 1 and not pixels:
        return original.data
    stream = io.BytesIO()
    image.save(stream, "PPM" if pixels else "JPEG", quality=quality)
    return stream.getvalue()
