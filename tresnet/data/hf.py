"""Open data sets of Hugging Face `datasets`: saved directories, Parquet, tar files and the hub.

`datasets` prepares Arrow files in its cache, or finds those that `save_to_disk` wrote. Item i is
row i of these files, which a memory map reads. Decoding and labels are as in image folders.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tresnet.data.folder import ImageDataset
from tresnet.data.pictures import BadImageError, Picture, named
from tresnet.errors import DataError, listed, needed
from tresnet.settings import DataColumns

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hf-hub:"  # prefix of a repository's name, as for weights
_LABELS = ("label", "labels", "cls")  # columns of plain integers that are labels; cls: WebDataset
_SAMPLES = 1000  # images whose bytes are part of the digest


class HFDataset(ImageDataset):
    """One split of a Hugging Face data set, whose `rows` are read through a memory map."""

    def __init__(self, rows: "Dataset", where: str, columns: DataColumns, *options: Any) -> None:
        """Find the columns and read all labels, or raise DataError, which names `where`."""
        from datasets import ClassLabel, Image

        features = dict(rows.features)
        images = [name for name, feature in features.items() if isinstance(feature, Image)]
        inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
        labels = [
            name
            for name, feature in inner.items()
            if isinstance(feature, ClassLabel)
            or (name in _LABELS and "int" in str(getattr(feature, "dtype", None)))
        ]
        columns_of = {
            "--image-column": ("images", columns.image_column, images),
            "--label-column": ("class labels", columns.label_column, labels),
        }
        chosen = []
        for option, (what, wanted, found) in columns_of.items():
            names = found if wanted is None else [wanted] if wanted in features else []
            if len(names) != 1:
                raise DataError(
                    f"expected one column of {what} in {where}, got {listed(names)} "
                    f"among {features}: name it by {option}"
                )
            chosen += names
        self._column, label = chosen
        feature = features[self._column]
        if not isinstance(feature, Image):  # encoded images in a column that others wrote
            kind = getattr(feature, "dtype", None)
            if kind not in ("binary", "large_binary") and "bytes" not in (
                feature if isinstance(feature, dict) else ()
            ):
                raise DataError(
                    f"expected images in column {self._column!r} of {where}, got {feature}: name "
                    "another column by --image-column"
                )
            rows = rows.cast_column(self._column, Image(decode=False))
        self._rows = rows
        self._where = where
        classes, targets = _labels(
            rows.data.column(label), features[label], f"column {label!r} of {where}"
        )
        super().__init__(str(rows.split), classes, (), targets, *options)

    @cached_property
    def _images(self) -> Any:
        return self._rows.data.column(self._column)  # takes milliseconds where there are many files

    def __getstate__(self) -> dict[str, Any]:
        """Leave the images out: a spawned worker opens the memory map again."""
        return {name: value for name, value in vars(self).items() if name != "_images"}

    def picture(self, index: int) -> Picture:
        """Read a row's image without decoding its pixels; raise BadImageError if that fails."""
        image = self._images[index].as_py() or {}
        data, path = image.get("bytes"), image.get("path")
        name = f"{path or 'an image'} (row {index}, column {self._column} of {self._where})"
        if data is None:
            if path is None:
                raise BadImageError(name, "the row has no image")
            with named(name):
                data = Path(path).read_bytes()
        return Picture(data, name)

    @property
    def digest(self) -> str:
        """Hash of class names, of all images' sizes, and of the bytes of 1000 images.

        The fingerprint of `datasets` is no such hash: it depends on names and times of files.
        """
        import pyarrow.compute as pc

        data = pc.call_function("struct_field", [self._images], pc.StructFieldOptions(["bytes"]))
        sizes = pc.call_function("binary_length", [data]).fill_null(-1).to_numpy()
        digest = hashlib.sha256(repr(self.classes).encode() + sizes.astype(np.int64).tobytes())
        for index in np.linspace(0, len(self) - 1, min(len(self), _SAMPLES)).astype(int).tolist():
            try:
                digest.update(self.picture(index).data)
            except BadImageError:  # the loader will raise an error for it, or skip it
                digest.update(b"?")
        return digest.hexdigest()


def _labels(column: Any, feature: Any, where: str) -> tuple[list[str], torch.Tensor]:
    """Return names of classes, and labels: (N,), int64, or (N, classes), uint8."""
    import pyarrow
    import pyarrow.compute as pc

    inner = getattr(feature, "feature", feature)
    multi = inner is not feature
    values = pc.call_function("list_flatten", [column]) if multi else column
    missing = column.null_count or values.null_count
    if not pyarrow.types.is_integer(values.type) or missing or not len(column):
        raise DataError(
            f"expected the number of a class for each image in {where}, got {feature} in "
            f"{len(column)} rows, {missing} without: convert texts by class_encode_column of "
            "datasets, or name another column by --label-column"
        )
    numbers = np.require(values.to_numpy(), np.int64, "W")
    low, top = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    classes = getattr(inner, "names", None) or [str(number) for number in range(top + 1)]
    if len(classes) < 2 or low < 0 or top >= len(classes):
        raise DataError(
            f"expected at least two classes in {where}, and labels from 0 to one less, got "
            f"{len(classes)} classes and labels from {low} to {top}: is it a split without labels?"
        )
    if not multi:
        return classes, torch.from_numpy(numbers)
    targets = torch.zeros(len(column), len(classes), dtype=torch.uint8)
    targets.numpy()[pc.call_function("list_parent_indices", [column]).to_numpy(), numbers] = 1
    return classes, targets


def open_hf(
    source: str,
    split: str,
    transform: Callable[[Picture], Any] | None = None,
    skip_bad_images: bool = False,
    columns: DataColumns | None = None,
    workers: int = 0,
) -> HFDataset:
    """Open one split of `hf-hub:USER/NAME`, or of a directory that `datasets` can read.

    `val` and `validation` are names of one split. `workers` is the number of processes that prepare
    the data. An unreadable data set, a missing split and columns of other types raise DataError.
    """
    columns = columns or DataColumns()
    with needed(f"--data {source}", "hf"):
        import datasets
    name = source.replace(HUB, "hf://datasets/", 1) if source.startswith(HUB) else source
    try:
        if is_saved(Path(name)):
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name, columns.data_config, num_proc=workers or None)
    except Exception as error:  # readers of each format raise types of their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"cannot open the data set {source} ({reason}): check its name and files; data on the "
            "hub need a network, and private or gated data `hf auth login`"
        ) from error
    if isinstance(splits, datasets.Dataset):
        splits = {str(splits.split or split): splits}
    alias = {"val": "validation", "validation": "val"}.get(split, split)
    found = splits.get(split, splits.get(alias))  # type: ignore[union-attr]
    if found is None:
        raise DataError(
            f"expected a split {split!r} in {source}, got {listed(splits)}: name "
            "others by --train-split and --val-split, or by --split of eval.py"
        )
    return HFDataset(found, f"the split {split} of {source}", columns, transform, skip_bad_images)


def is_saved(folder: Path) -> bool:
    """Return whether `folder` was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
