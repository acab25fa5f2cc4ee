"""Open the data set that `--data` names: a directory, a data set on the hub, or a URL."""

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from tresnet.data.decoding import EncodedImage
from tresnet.data.folder import ImageDataset, open_folder
from tresnet.data.hf import HUB, is_saved, open_hf
from tresnet.data.multilabel import label_file, open_multilabel
from tresnet.errors import DataError, TResNetError
from tresnet.files import as_write_error, atomic_directory
from tresnet.settings import DataColumns


def open_split(
    source: str,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    *,
    multi: bool | None = False,
    skip_bad_images: bool = False,
    columns: DataColumns | None = None,
    workers: int = 0,
) -> ImageDataset:
    """Open a split of class folders, multi-label files or a Hugging Face data set.

    Images must have any number of labels if `multi` is True, and one label if it is False. None
    accepts both kinds of a Hugging Face data set. A data set of the wrong kind raises DataError.
    `columns` and `workers` are arguments of `open_hf`.
    """
    root = Path(source)
    if (root / f"{split}.shards.json").exists():
        raise DataError(
            f"expected images, but {root} holds ArrayRecord shards of an earlier version, which are"
            " no longer read: write them anew from the images with `tresnet shard`"
        )
    if is_saved(root / split):
        source = str(root / split)
    elif not source.startswith(HUB) and not is_saved(root) and not _has_tables(root, split, multi):
        opener = open_multilabel if multi else open_folder
        return opener(root, split, transform, skip_bad_images)
    dataset = open_hf(source, split, transform, skip_bad_images, columns, workers)
    if multi not in (None, dataset.multi):
        kinds = ["one label per image", "any number of labels"]
        raise DataError(
            f"expected images with {kinds[bool(multi)]}, but {source} has {kinds[not multi]}: "
            "choose --loss (in eval.py --labels) accordingly, or another --label-column"
        )
    return dataset


def _has_tables(root: Path, split: str, multi: bool | None) -> bool:
    """Return whether `root` has tables or tar files and no class folders (`multi`: label file)."""
    if label_file(root, split) if multi else any((root / split).glob("*/")):
        return False
    paths = (path for level in ("*", "*/*") for path in root.glob(level))
    return any(path.suffix in (".parquet", ".arrow", ".tar") for path in paths)


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
