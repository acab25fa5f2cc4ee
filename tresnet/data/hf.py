"""Open data sets of Hugging Face `datasets`: saved directories, Parquet, tar files and the hub.

The images are in Arrow files, in the cache of `datasets` or in a directory of `save_to_disk`. Each
image is read from one record batch of a memory-mapped file. `datasets` itself would open a table of
all batches in each process, and the table's memory would grow with the number of images.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tresnet.data.decoding import BadImageError, EncodedImage, as_bad_image_error
from tresnet.data.folder import ImageDataset
from tresnet.errors import DataError, listed, needed
from tresnet.settings import DataColumns

HUB = "hf-hub:"  # prefix of a name on the Hugging Face hub
_LABELS = ("label", "labels", "cls")  # names of integer label columns; WebDataset uses cls
_NO_IMAGE = "the row has no image"
_SAMPLES = 1000  # images whose bytes are part of the digest


class HFDataset(ImageDataset):
    """One split of a Hugging Face data set, whose Arrow `files` are read through a memory map."""

    def __init__(
        self, files: list[str], split: str, where: str, columns: DataColumns, *options: Any
    ) -> None:
        """Choose the columns and read all labels; `where` names the data set in errors."""
        from datasets import ClassLabel, Features, Image

        self._files, self._where = files, where
        _, schema = self._maps[0]
        features = dict(Features.from_arrow_schema(schema))
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
        if "binary" not in str(schema.field(self._column).type):
            raise DataError(
                f"expected images in column {self._column!r} of {where}, got "
                f"{features[self._column]}: name another column by --image-column"
            )
        classes, targets, self._batches = self._read_labels(label, features[label])
        self._ends = self._batches[:, 2].cumsum()
        super().__init__(split, classes, (), targets, *options)

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

    def _read_labels(self, name: str, feature: Any) -> tuple[list[str], torch.Tensor, np.ndarray]:
        """Return class names, labels, and (file index, byte offset, rows) of each record batch.

        Labels are (N,), int64, or for multi-label data (N, classes), uint8.
        """
        import pyarrow as pa

        inner = getattr(feature, "feature", feature)
        multi, where = inner is not feature, f"column {name!r} of {self._where}"
        batches, numbers, owners, rows = [], bytearray(), bytearray(), 0
        for batch, column in self._column_batches(name):
            values = column.flatten() if multi else column
            if not pa.types.is_integer(values.type) or column.null_count or values.null_count:
                raise DataError(
                    f"expected the index of a class for each image in {where}, got {feature}, and "
                    f"no integer in some of the rows {rows} to {rows + len(column) - 1}: convert "
                    "texts by class_encode_column of datasets, or name another column by "
                    "--label-column"
                )
            batches.append(batch)
            numbers += values.to_numpy().astype(np.int64).tobytes()
            if multi:
                indices = column.value_parent_indices().to_numpy() + rows
                owners += indices.astype(np.int64).tobytes()
            rows += len(column)
        labels = np.frombuffer(numbers, np.int64)
        low, top = int(labels.min(initial=0)), int(labels.max(initial=0))
        classes = getattr(inner, "names", None) or [str(number) for number in range(top + 1)]
        if len(classes) < 2 or low < 0 or top >= len(classes) or not rows:
            raise DataError(
                f"expected at least two classes in {where}, with labels from 0 to one less than "
                f"their number, got {rows} images of {len(classes)} classes with labels from {low} "
                f"to {top}: is it a split without labels?"
            )
        if not multi:
            return classes, torch.from_numpy(labels), np.array(batches)
        targets = torch.zeros(rows, len(classes), dtype=torch.uint8)
        targets.numpy()[np.frombuffer(owners, np.int64), labels] = 1
        return classes, targets, np.array(batches)

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
                data = Path(path).read_bytes()
        return EncodedImage(data, name)

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


def open_hf(
    source: str,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    skip_bad_images: bool = False,
    columns: DataColumns | None = None,
    workers: int = 0,
) -> HFDataset:
    """Open one split of `hf-hub:USER/NAME`, or of a directory that `datasets` can read.

    `val` and `validation` name the same split. `workers` is the number of processes that prepare
    the data. An unreadable data set, a missing split or an unsuitable column raises DataError.
    """
    columns = columns or DataColumns()
    with needed(f"--data {source}", "hf"):
        import datasets
        from datasets.naming import filenames_for_dataset_split
    # The path is absolute: `datasets` would take a relative path "text" for a format's name.
    path = str(Path(source).absolute())
    name = source.replace(HUB, "hf://datasets/", 1) if source.startswith(HUB) else path
    try:
        splits = _saved_files(Path(name), split)
        if splits is None:
            builder = datasets.load_dataset_builder(name, columns.data_config)
            builder.download_and_prepare(num_proc=workers or None)
            infos: Any = builder.info.splits
            place = (builder.cache_dir, builder.dataset_name)
            splits = {
                each: filenames_for_dataset_split(*place, each, "arrow", info.shard_lengths)
                for each, info in infos.items()
            }
        alias = {"val": "validation", "validation": "val"}.get(split, split)
        actual = next((each for each in (split, alias) if each in splits), None)
        if actual is None:
            raise DataError(
                f"expected a split {split!r} in {source}, got {listed(splits)}: name "
                "another by --train-split and --val-split, --split of eval.py or --splits of shard"
            )
        where = f"the split {split} of {source}"
        return HFDataset(splits[actual], actual, where, columns, transform, skip_bad_images)
    except DataError:
        raise
    except Exception as error:  # each format's reader raises its own types of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"cannot open the data set {source} ({reason}): check its name and files; data on the "
            "hub need a network, and private or gated data `hf auth login`"
        ) from error


def _saved_files(folder: Path, split: str) -> dict[str, list[str]] | None:
    """Return each split's Arrow files in a folder of `save_to_disk`, or None for other folders."""
    if not is_saved(folder):
        return None
    names, folders = folder / "dataset_dict.json", {split: folder}
    if names.is_file():
        folders = {name: folder / name for name in json.loads(names.read_text())["splits"]}
    return {
        name: [
            str(place / file["filename"])
            for file in json.loads((place / "state.json").read_text())["_data_files"]
        ]
        for name, place in folders.items()
    }


def is_saved(folder: Path) -> bool:
    """Return whether `folder` was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
