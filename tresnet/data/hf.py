"""Open data sets of Hugging Face `datasets`: saved directories, Parquet, tar files and the hub.

The images are in Arrow files, in the cache of `datasets` or in a directory of `save_to_disk`. Each
image is read from one record batch of a memory-mapped file. `datasets` itself would open a table of
all batches in each process, and the table's memory would grow with the number of images.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tresnet.data.classes import composed
from tresnet.data.decoding import (
    BadImageError,
    EncodedImage,
    as_bad_image_error,
    read_image_file,
)
from tresnet.data.folder import ImageDataset, is_hidden
from tresnet.errors import DataError, listed, needed
from tresnet.settings import DataOptions

HUB = "hf-hub:"  # prefix of a name on the Hugging Face hub
_LABELS = ("label", "labels", "cls")  # names of label columns; WebDataset uses cls
_LABEL_DTYPES = ("bool", "float", "string", "large_string")  # less usual than integers
_NO_IMAGE = "the row has no image"
_SAMPLES = 1000  # images whose bytes are part of the digest


class HFDataset(ImageDataset):
    """One split of a Hugging Face data set, whose Arrow `files` are read through a memory map."""

    def __init__(self, files: list[str], split: str, where: str, options: DataOptions) -> None:
        """Choose the columns and read all labels; `where` names the data set in errors."""
        from datasets import ClassLabel, Features, Image

        self._files, self._where = files, where
        _, schema = self._maps[0]
        features = dict(Features.from_arrow_schema(schema))
        images = [name for name, feature in features.items() if isinstance(feature, Image)]
        inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
        dtypes = {name: str(getattr(feature, "dtype", None)) for name, feature in inner.items()}
        labels = [
            name
            for name, feature in inner.items()
            if isinstance(feature, ClassLabel) or (name in _LABELS and "int" in dtypes[name])
        ] or [name for name in _LABELS if dtypes.get(name, "").startswith(_LABEL_DTYPES)]
        columns_of = {
            "--image-column": ("images", options.image_column, images),
            "--label-column": ("class labels", options.label_column, labels),
        }
        chosen = []
        for option, (what, wanted, suitable) in columns_of.items():
            names = suitable if wanted is None else [wanted] if wanted in features else []
            if len(names) != 1:
                raise DataError(
                    f"expected one column of {what} in {where}, got {listed(names)} "
                    f"among {features}: name it by {option}"
                )
            chosen += names
        self._column, label = chosen
        # A column that the user named need not have the type Image, but it must hold bytes.
        if not _holds_bytes(schema.field(self._column).type):
            raise DataError(
                f"expected images in column {self._column!r} of {where}, one in each row, got "
                f"{features[self._column]}: name another column by --image-column"
            )
        classes, targets, inferred = self._read_labels(label, features[label])
        self._ends = self._batches[:, 2].cumsum()
        super().__init__(split, classes, (), targets, inferred=inferred)

    @cached_property
    def _maps(self) -> list[tuple[Any, Any]]:
        """Memory-mapped content and schema of each file."""
        import pyarrow as pa

        contents = [pa.memory_map(file).read_buffer() for file in self._files]
        return [(content, pa.ipc.open_stream(content).schema) for content in contents]

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the memory maps, because a spawned worker opens its own."""
        return {name: value for name, value in vars(self).items() if name != "_maps"}

    def _column_batches(self, name: str) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """Yield (file index, byte offset, rows) and the column's values for each record batch."""
        import pyarrow as pa

        for number, file in enumerate(self._files):
            field = self._maps[number][1].get_field_index(name)
            options = pa.ipc.IpcReadOptions(included_fields=[field])
            with pa.memory_map(file) as source, pa.ipc.open_stream(source, options=options) as all_:
                offset = source.tell()
                for batch in all_:
                    yield (number, offset, len(batch)), batch.column(0)
                    offset = source.tell()

    def _read_labels(self, name: str, feature: Any) -> tuple[list[str], torch.Tensor, bool]:
        """Store the record batches; return class names, labels, and whether the names are inferred.

        Labels are (N,), int64, or for multi-label data (N, classes), uint8.
        """
        import pyarrow as pa

        inner = getattr(feature, "feature", feature)
        multi, where = inner is not feature, f"column {name!r} of {self._where}"
        batches, numbers, lengths, indices = [], array("q"), array("q"), dict[Any, int]()
        for batch, column in self._column_batches(name):
            batches.append(batch)
            values: Any = column.flatten() if multi else column
            nested = pa.types.is_nested(values.type)
            values = [values.type] if nested else values.to_pylist()
            if column.null_count:
                values.append(None)
            numbers.extend(indices.setdefault(value, len(indices)) for value in values)
            if multi:
                lengths.extend(column.value_lengths().fill_null(0).to_pylist())
        self._batches = np.array(batches)
        for value in indices:
            if not _is_label(value):
                raise DataError(
                    f"expected the name or the index of a class for each image in {where}, got "
                    f"{feature} with the value {value!r:.80}: name another column by --label-column"
                )
        labels, row_lengths = np.frombuffer(numbers, np.int64), np.frombuffer(lengths, np.int64)
        rows = len(row_lengths) if multi else len(labels)
        texts = any(isinstance(value, str) for value in indices)
        named = [composed(value) if texts else int(value) for value in indices]
        distinct = np.array(named, object if texts else np.int64)
        low, top = (0, 0) if texts else (int(distinct.min(initial=0)), int(distinct.max(initial=0)))
        classes = list(map(composed, getattr(inner, "names", None) or ()))
        inferred = not classes
        if inferred and not texts and _is_multi_hot(distinct[labels], row_lengths):
            targets = distinct[labels].astype(np.uint8).reshape(rows, -1)
            names = [str(number) for number in range(row_lengths[0])]
            return names, torch.from_numpy(targets), False
        if inferred:
            distinct, ranks = np.unique(distinct, return_inverse=True)
            classes, labels = list(map(str, distinct.tolist())), ranks[labels]
        else:
            labels = distinct[labels]
        # A split may have one of the classes of another split.
        outside = len(classes) < (1 if inferred else 2) or (not inferred and top >= len(classes))
        if low < 0 or outside or not rows:
            raise DataError(
                f"expected at least two classes in {where}, with labels from 0 to one less than "
                f"their number, got {rows} images of {len(classes)} classes with labels from {low} "
                f"to {top}: is it a split without labels?"
            )
        if not multi:
            return classes, torch.from_numpy(labels), inferred
        targets = np.zeros((rows, len(classes)), np.uint8)
        targets[np.repeat(np.arange(rows), row_lengths), labels] = 1
        repeated = np.flatnonzero(targets.sum(1, dtype=np.int64) < row_lengths)
        if len(repeated):
            raise DataError(
                f"expected every class of an image once in {where}, got one twice in row "
                f"{repeated[0]}: lists name classes, or have 0 or 1 for each class of a type that "
                "is not ClassLabel"
            )
        return classes, torch.from_numpy(targets), inferred

    def encoded_image(self, index: int) -> EncodedImage:
        """Read a row's image without decoding its pixels; a bad image raises BadImageError."""
        import pyarrow as pa

        batch = self._ends.searchsorted(index, "right")
        number, offset, rows = self._batches[batch].tolist()
        content, schema = self._maps[number]
        column = pa.ipc.read_record_batch(content[offset:], schema).column(self._column)
        image = column[index - int(self._ends[batch]) + rows].as_py() or {}
        image = image if isinstance(image, dict) else {"bytes": image}
        data, path = image.get("bytes"), image.get("path")
        name = self._name(index, path)
        if data is None:
            if path is None:
                raise BadImageError(name, _NO_IMAGE)
            with as_bad_image_error(name):
                data = read_image_file(path)
        return EncodedImage(data, name, self.max_pixels)

    def _name(self, row: int, path: str | None = None) -> str:
        return f"{path or 'an image'} (row {row}, column {self._column} of {self._where})"

    @property
    def digest(self) -> str:
        """Hash of the class names, of all images' byte counts, and of 1000 evenly spaced images.

        The fingerprint of `datasets` is not used, because it depends on names and times of files. A
        row without an image raises DataError, unless `skip_bad_images` is set.
        """
        import pyarrow.compute as pc

        digest = hashlib.sha256(repr(self.classes).encode())
        rows = 0
        for _, images in self._column_batches(self._column):
            if images.null_count and not self.skip_bad_images:
                row = rows + images.is_null().index(True).as_py()
                raise BadImageError(self._name(row), _NO_IMAGE).advising_skip()
            rows += len(images)
            data = images.field("bytes") if hasattr(images, "field") else images
            sizes = pc.call_function("binary_length", [data]).fill_null(-1).to_numpy()
            digest.update(sizes.astype(np.int64))
        for index in np.linspace(0, len(self) - 1, min(len(self), _SAMPLES)).astype(int).tolist():
            try:
                digest.update(self.encoded_image(index).data)
            except BadImageError:  # the loader will skip this image or raise an error
                digest.update(b"?")
        return digest.hexdigest()


def open_hf(source: str, split: str, options: DataOptions, workers: int = 0) -> HFDataset:
    """Open one split of `hf-hub:USER/NAME`, or of a directory that `datasets` can read.

    `val` and `validation` name the same split. `workers` is the number of processes that prepare
    the data. An unreadable data set, a missing split or an unsuitable column raises DataError.
    """
    with needed(f"--data {source}", "hf"):
        import datasets
        from datasets.naming import filenames_for_dataset_split
    # The path is absolute: `datasets` would take a relative path "text" for a format's name.
    path = str(Path(source).absolute())
    name = source.replace(HUB, "hf://datasets/", 1) if source.startswith(HUB) else path
    try:
        splits = {each: _files_of(place) for each, place in saved_splits(Path(name)).items()}
        if not splits:
            builder = datasets.load_dataset_builder(name, options.data_config)
            builder.download_and_prepare(num_proc=workers or None)
            infos: Any = builder.info.splits
            place = (builder.cache_dir, builder.dataset_name)
            splits = {
                each: filenames_for_dataset_split(*place, each, "arrow", info.shard_lengths)
                for each, info in infos.items()
            }
        actual = find_split(split, splits)
        if actual is None:
            raise DataError(
                f"expected a split {split!r} in {source}, got {listed(splits)}: name "
                "another by --train-split and --val-split, --split of eval.py or --splits of shard"
            )
        where = f"the split {split} of {source}"
        return HFDataset(splits[actual], actual, where, options)
    except DataError:
        raise
    except Exception as error:  # each format's reader raises its own types of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"cannot open the data set {source} ({reason}): check its name and files; data on the "
            "hub need a network, and private or gated data `hf auth login`"
        ) from error


def _is_label(value: object) -> bool:
    """Return whether a value is a text that is not blank, or a whole number of 64 bits."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int | float) and value % 1 == 0 and -(2**63) <= value < 2**63


def _is_multi_hot(labels: np.ndarray, row_lengths: np.ndarray) -> bool:
    """Return whether all rows have 0 or 1 for each of at least two classes."""
    if not len(row_lengths) or row_lengths[0] < 2 or (row_lengths != row_lengths[0]).any():
        return False
    return labels.min() >= 0 and labels.max() <= 1


def _holds_bytes(kind: Any) -> bool:
    """Return whether a column of this Arrow type has an image's bytes, or a struct of them."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _files_of(folder: Path) -> list[str]:
    """Return the Arrow files of a data set that `Dataset.save_to_disk` wrote."""
    state = json.loads((folder / "state.json").read_text())
    return [str(folder / file["filename"]) for file in state["_data_files"]]


def find_split(split: str, splits: Collection[str]) -> str | None:
    """Return the name of `split` among `splits`; val and validation are one name."""
    alias = {"val": "validation", "validation": "val"}.get(split, split)
    return next((each for each in (split, alias) if each in splits), None)


def saved_splits(folder: Path) -> dict[str, Path]:
    """Return the splits that `save_to_disk` wrote into `folder` or its folders; {} if none.

    A single `Dataset` has the name of the split from which it comes, or "train", as data files
    without a split have in `datasets`.
    """
    names, state = folder / "dataset_dict.json", folder / "state.json"
    if names.is_file():
        return {name: folder / name for name in json.loads(names.read_text())["splits"]}
    if state.is_file():
        name = re.match(r"\w+", json.loads(state.read_text()).get("_split") or "")
        return {name[0] if name else "train": folder}
    places = [path.parent for path in sorted(folder.glob("*/state.json"))]
    return {place.name: place for place in places if not is_hidden(place.name)}
