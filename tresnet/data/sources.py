"""Open the data set that `--data` names: a directory, a data set on the hub, or a URL."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from tresnet.data.channels import RGB, ImageReader
from tresnet.data.dataset import ImageDataset, Paths
from tresnet.data.decoding import EncodedImage
from tresnet.data.folder import read_folder, visible_files
from tresnet.data.hf import HUB, ArrowImages, find_split, read_hf, saved_splits
from tresnet.data.label_files import image_folders, label_file, read_header, read_listing
from tresnet.data.labels import HOT, Labels, RawLabels, class_map, encode, match
from tresnet.errors import ConfigError, DataError, TResNetError, listed
from tresnet.settings import DataOptions
from tresnet.writing import as_write_error, atomic_directory


def open_split(
    source: str | Path,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    *,
    multi: bool | None = False,
    skip_bad_images: bool = False,
    options: DataOptions | None = None,
    workers: int = 0,
    like: Labels | None = None,
    reader: ImageReader = RGB,
) -> ImageDataset:
    """Open a split of class folders, multi-label files or a Hugging Face data set.

    Images must have any number of labels if `multi` is True, and one label if it is False. None
    accepts both kinds of a Hugging Face data set. A data set of the wrong kind raises DataError.
    `options` say how to read the data; `workers` processes prepare a Hugging Face data set. Labels
    of a source without a list of classes are those of `like`, the split to train on. `reader` says
    what images are; their largest number of pixels is that of `options`.
    """
    root, options = Path(source), options or DataOptions()
    reader = replace(reader, max_pixels=options.max_image_pixels)
    if root.is_file():
        raise DataError(
            f"expected a directory, got the file {root}: name its directory, in which the names of "
            "files tell the split, such as train-0.parquet and validation-0.parquet"
        )
    images, raw = _read(source, split, bool(multi), options, reader.suffixes, workers)
    if multi not in (None, raw.lengths is not None):
        kinds = ["one label per image", "any number of labels"]
        raise DataError(
            f"expected images with {kinds[bool(multi)]}, but {source} has {kinds[not multi]}: "
            "choose --loss (in eval.py --labels) accordingly, or another --label-column"
        )
    labels = _encode(raw, like, options)
    if not len(labels.indices):  # nothing could be learned, and no metric would be defined
        raise DataError(
            f"expected labels in {raw.where}, but no image has any: is it a split without labels?"
            " Add images that have one, or name another split"
        )
    return ImageDataset(split, images, labels, transform, skip_bad_images, reader)


def _encode(raw: RawLabels, like: Labels | None, options: DataOptions) -> Labels:
    names = class_map(options.class_map)
    if names is None:
        return encode(raw, like)
    labels = encode(raw)
    facts = {"numbered": labels.numbered, "whole": labels.reading == HOT}
    try:
        found = match(labels.names, names, "outputs", **facts)
    except ConfigError as error:
        raise DataError(
            f"expected only the {len(names)} classes that {options.class_map} lists, got "
            f"{listed(labels.names, 12)} in {raw.where}: correct the list"
        ) from error
    return replace(labels, names=found.names).arranged(names)


def _read(
    source: str | Path,
    split: str,
    multi: bool,
    options: DataOptions,
    suffixes: tuple[str, ...],
    workers: int,
) -> tuple[Paths | ArrowImages, RawLabels]:
    """Read what `datasets` saved, files of labels, class folders, or else tables and tar files."""
    root, saved = Path(source), saved_splits(Path(source))
    is_table = str(source).startswith(HUB) or find_split(split, saved) is not None
    file = None if is_table else label_file(root, split, multi, suffixes)
    in_folders = not (is_table or multi) and any(image_folders(root / split, suffixes))
    if not (is_table or file or in_folders):
        files = visible_files(str(root), Counter()) if root.is_dir() else ()
        found = {Path(name).suffix for _, names in files for name in names}
        is_table = bool(saved) or not found.isdisjoint((".parquet", ".arrow", ".tar"))
    if is_table:
        return read_hf(str(source), split, options, workers)
    if multi or file:
        paths, raw = read_listing(root, split, file, options, multi, suffixes)
    else:
        if not in_folders and (table := root / f"{split}.csv").is_file():
            raise DataError(
                f"{table}: expected the header 'image,label', and a path and a label in each line, "
                f"got {','.join(read_header(table))!r:.80}: rename the columns, leave out others "
                "and put commas between the cells. For any number of labels choose --loss bce or "
                f"asymmetric (in eval.py --labels multi). Without such a file, {root / split}/"
                "<class>/<image> are read"
            )
        paths, raw = read_folder(root, split, suffixes)
    return Paths(paths), raw


def fetch(source: str) -> str:
    """Return `source`, or if it is a URL, the path of a local copy of its directory.

    URLs may have any scheme of fsspec. The copy in `$HF_HOME/tresnet` is made once, and again if a
    file of the source changes. While one process copies, other processes wait. DataError:
    `source` has no files or cannot be copied. WriteError: the copy's folder cannot be made.
    """
    if "://" not in source:
        return source
    from fsspec.core import url_to_fs
    from huggingface_hub.constants import HF_HOME
    from huggingface_hub.utils import WeakFileLock

    try:
        system, root = url_to_fs(source)
        files: Any = system.find(root, detail=True)
        if not files:
            raise FileNotFoundError("there are no files")
        tags = ("size", "ETag", "etag", "mtime")
        state = [(name, *(files[name].get(tag) for tag in tags)) for name in sorted(files)]
        key = hashlib.sha256(repr((source, state)).encode()).hexdigest()[:16]
        target = Path(HF_HOME, "tresnet", key, PurePosixPath(root).name)
        with as_write_error(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target.parent / ".lock"):
            if not target.exists():
                with atomic_directory(target) as folder:
                    system.get(f"{root.rstrip('/')}/", f"{folder}/", recursive=True)
    except TResNetError:
        raise
    except Exception as error:  # each store raises its own types of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"cannot copy {source} ({reason}): check the address and access") from error
    return str(target)
