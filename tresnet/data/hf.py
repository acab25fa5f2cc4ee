"""Open data sets of Hugging Face `datasets`: saved directories, Parquet, tar files and the hub.

The images are in Arrow files, in the cache of `datasets` or in a directory of `save_to_disk`. Each
image is read from one record batch of a memory-mapped file. `datasets` itself would open a table of
all batches in each process, and the table's memory would grow with the number of images.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tresnet.data.channels import RGB, ImageReader
from tresnet.data.decoding import (
    BadImageError,
    EncodedImage,
    as_bad_image_error,
    read_image_file,
)
from tresnet.data.folder import is_hidden
from tresnet.data.labels import RawLabels
from tresnet.errors import DataError, listed, needed
from tresnet.settings import DataOptions

HUB = "hf-hub:"  # prefix of a name on the Hugging Face hub
_LABELS = ("label", "labels", "cls")  # names of label columns; WebDataset uses cls
_LABEL_DTYPES = ("bool", "float", "string", "large_string")  # less usual than integers
_NO_IMAGE = "the row has no image"
_SAMPLES = 1000  # images whose bytes are part of the digest


class ArrowImages:
    """Images of one split, in Arrow `files` that are read through a memory map."""

    paths: Sequence[str] = ()

    def __init__(self, files: list[str], where: str, folders: Sequence[str] = ()) -> None:
        """Open the files; `where` names the data set in errors.

        A row without an image's bytes has a path, which must be below one of `folders`, if any.
        """
        self._files, self._where, self._folders = files, where, folders

    def read_labels(self, options: DataOptions) -> RawLabels:
        """Choose the columns of images and labels, and read all labels."""
        from datasets import ClassLabel, Features, Image

        where = self._where
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
        return self._raw_labels(label, features[label])

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

    def _raw_labels(self, name: str, feature: Any) -> RawLabels:
        """Store the record batches, and return a column's labels."""
        import pyarrow as pa

        inner = getattr(feature, "feature", feature)
        multi, where = inner is not feature, f"column {name!r} of {self._where}"
        batches, codes, lengths, indices = [], array("q"), array("q"), dict[Any, int]()
        for batch, column in self._column_batches(name):
            batches.append(batch)
            values: Any = column.flatten() if multi else column
            nested = pa.types.is_nested(values.type)
            values = [values.type] if nested else values.to_pylist()
            if column.null_count:
                values.append(None)
            codes.extend(indices.setdefault(value, len(indices)) for value in values)
            if multi:
                lengths.extend(column.value_lengths().fill_null(0).to_pylist())
        self._batches = np.array(batches)
        self._ends = self._batches[:, 2].cumsum()
        for value in indices:
            if not _is_label(value):
                raise DataError(
                    f"expected the name or the index of a class for each image in {where}, got "
                    f"{feature} with the value {value!r:.80}: name another column by --label-column"
                )
        texts = any(isinstance(value, str) for value in indices)
        return RawLabels(
            where,
            [value if texts else int(value) for value in indices],
            np.frombuffer(codes, np.int64),
            np.frombuffer(lengths, np.int64) if multi else None,
            getattr(inner, "names", None),
        )

    def open(self, index: int, reader: ImageReader = RGB) -> EncodedImage:
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
            place = Path(os.path.abspath(path))  # without ".."
            if self._folders and not any(map(place.is_relative_to, self._folders)):
                raise BadImageError(name, "its path leaves the data's directory: --outside-paths")
            with as_bad_image_error(name):
                data = read_image_file(path)
        return reader.decode(data, name)

    def _name(self, row: int, path: str | None = None) -> str:
        return f"{path or 'an image'} (row {row}, column {self._column} of {self._where})"

    def digest(self, classes: list[str], skip_bad_images: bool) -> str:
        """Hash of the class names, of all images' byte counts, and of 1000 evenly spaced images.

        The fingerprint of `datasets` is not used, because it depends on names and times of files. A
        row without an image raises DataError, unless `skip_bad_images` is set.
        """
        import pyarrow.compute as pc

        digest = hashlib.sha256(repr(classes).encode())
        rows = 0
        for _, images in self._column_batches(self._column):
            if images.null_count and not skip_bad_images:
                row = rows + images.is_null().index(True).as_py()
                raise BadImageError(self._name(row), _NO_IMAGE).advising_skip()
            rows += len(images)
            data = images.field("bytes") if hasattr(images, "field") else images
            sizes = pc.call_function("binary_length", [data]).fill_null(-1).to_numpy()
            digest.update(sizes.astype(np.int64))
        for index in np.linspace(0, rows - 1, min(rows, _SAMPLES)).astype(int).tolist():
            try:
                digest.update(self.open(index).data)
            except BadImageError:  # the loader will skip this image or raise an error
                digest.update(b"?")
        return digest.hexdigest()


def read_hf(
    source: str, split: str, options: DataOptions, workers: int = 0
) -> tuple[ArrowImages, RawLabels]:
    """Return the images and labels of one split of a data set.

    `source` is `hf-hub:USER/NAME`, or a directory that `datasets` can read.

    `val` and `validation` name the same split. `workers` is the number of processes that prepare
    the data. An unreadable data set, a missing split or an unsuitable column raises DataError.
    """
    with needed(f"--data {source}", "hf"):
        import datasets
        from datasets.config import HF_DATASETS_CACHE
        from datasets.naming import filenames_for_dataset_split
        from huggingface_hub.constants import HF_HUB_CACHE
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
        places = (path, os.path.realpath(path), HF_DATASETS_CACHE, HF_HUB_CACHE)
        folders = () if options.outside_paths else tuple(os.path.abspath(place) for place in places)
        images = ArrowImages(splits[actual], f"the split {split} of {source}", folders)
        return images, images.read_labels(options)
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
