"""Open the data set that `--data` names: a directory, a data set on the hub, or a URL."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from tresnet.data.channels import SUFFIXES, Channels
from tresnet.data.dataset import ImageDataset, Paths
from tresnet.data.decoding import EncodedImage
from tresnet.data.folder import EXTENSIONS, read_folder, visible_files
from tresnet.data.hf import HUB, find_split, read_hf, saved_splits
from tresnet.data.label_files import check_header, label_file, read_listing
from tresnet.data.labels import HOT, Labels, Outputs, RawLabels, class_map, encode, match
from tresnet.errors import ConfigError, DataError, TResNetError, listed
from tresnet.settings import DataOptions
from tresnet.writing import as_write_error, atomic_directory

_TABLES = (".parquet", ".arrow", ".tar")  # suffixes of files that `datasets` reads


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
    channels: Channels | None = None,
) -> ImageDataset:
    """Open a split of class folders, multi-label files or a Hugging Face data set.

    Images must have any number of labels if `multi` is True, and one label if it is False. None
    accepts both kinds of a Hugging Face data set. A data set of the wrong kind raises DataError.
    `options` say how to read the data; `workers` processes prepare a Hugging Face data set. Labels
    of a source without a list of classes are those of `like`, the split to train on. With
    `channels`, images are TIFF and NumPy files of so many channels, otherwise RGB.
    """
    root, options = Path(source), options or DataOptions()
    suffixes = EXTENSIONS if channels is None else SUFFIXES
    if root.is_file():
        raise DataError(
            f"expected a directory, got the file {root}: name its directory, in which the names of "
            "files tell the split, such as train-0.parquet and validation-0.parquet"
        )
    if str(source).startswith(HUB) or _is_table(root, split, bool(multi), suffixes):
        images, raw = read_hf(str(source), split, options, workers)
    elif multi or label_file(root, split, multi=False):
        paths, raw = read_listing(root, split, options, multi=bool(multi))
        images = Paths(paths)
    else:
        check_header(root, split)
        paths, raw = read_folder(root, split, suffixes)
        images = Paths(paths)
    if multi not in (None, raw.lengths is not None):
        kinds = ["one label per image", "any number of labels"]
        raise DataError(
            f"expected images with {kinds[bool(multi)]}, but {source} has {kinds[not multi]}: "
            "choose --loss (in eval.py --labels) accordingly, or another --label-column"
        )
    labels = _encode(raw, like, options)
    limit = options.max_image_pixels
    return ImageDataset(split, images, labels, transform, skip_bad_images, limit, channels)


def _encode(raw: RawLabels, like: Labels | None, options: DataOptions) -> Labels:
    names = class_map(options.class_map)
    if names is None:
        return encode(raw, like)
    labels = encode(raw)
    facts = {"numbered": labels.numbered, "whole": labels.reading == HOT}
    try:
        found = match(labels.names, Outputs(len(names), names), "outputs", **facts)
    except ConfigError as error:
        raise DataError(
            f"expected only the {len(names)} classes that {options.class_map} lists, got "
            f"{listed(labels.names, 12)} in {raw.where}: correct the list"
        ) from error
    return replace(labels, names=found.names).arranged(names)


def _is_table(root: Path, split: str, multi: bool, suffixes: tuple[str, ...]) -> bool:
    """Return whether `datasets` reads the split: it was saved by it, or is in tables or tar files.

    Class folders with images of `suffixes`, or files of labels, come before tables and tar files.
    """
    saved, folder = saved_splits(root), root / split
    if find_split(split, saved) is not None:
        return True
    in_classes = (name.lower() for path, name in _files(folder) if path != str(folder))
    images = any(name.endswith(suffixes) for name in in_classes)
    if (not multi and images) or label_file(root, split, multi):
        return False
    return bool(saved) or any(Path(name).suffix in _TABLES for _, name in _files(root))


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the folder and the name of each visible file below `root`."""
    for path, names in visible_files(str(root), Counter()) if root.is_dir() else ():
        yield from ((path, name) for name in names)


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
