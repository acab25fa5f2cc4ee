"""Make Hugging Face data sets with `datasets`, without this package's writer."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tresnet.data.dataset import ImageDataset
from tresnet.data.sources import open_split


def as_dataset(folder: ImageDataset):
    """Return a folder's images as a data set, made without this package's writer."""
    datasets = pytest.importorskip("datasets")
    paths = [Path(path) for path in folder.paths]
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=folder.classes)}
    columns = {"image": images, "label": folder.targets.tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def save_rows(out: Path, features: dict[str, Any], **columns: list[Any]) -> None:
    """Write columns by `save_to_disk`; images are empty unless they are a column."""
    datasets = pytest.importorskip("datasets")
    empty = [{"bytes": b"", "path": None}] * len(columns["label"])
    columns, features = {"image": empty} | columns, {"image": datasets.Image()} | features
    datasets.Dataset.from_dict(columns, datasets.Features(features)).save_to_disk(out)


def write_rows(out: Path, rows: int) -> None:
    """Write `rows` images (rounded down to hundreds) as `save_to_disk` would, in one file."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, "PNG")
    columns = {"image": [{"bytes": png.getvalue(), "path": "0.png"}] * 100, "label": [0, 1] * 50}
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=2)}
    datasets.Dataset.from_dict(columns, datasets.Features(kinds)).save_to_disk(out)
    (file,) = out.glob("*.arrow")
    (batch,) = pa.ipc.open_stream(file.read_bytes())
    with pa.ipc.new_stream(file, batch.schema) as target:
        for _ in range(rows // 100):
            target.write_batch(batch)


def opening(out: Path) -> tuple[int, float, int]:
    """Open a data set in this process; return its length, the seconds, and bytes of memory."""
    import datasets  # noqa: F401  imported before the measurement
    import pyarrow  # noqa: F401

    before, begin = private_bytes(), time.perf_counter()
    dataset = open_split(str(out), "train")
    opened_s, grown = time.perf_counter() - begin, private_bytes() - before
    dataset[len(dataset) - 1]
    return len(dataset), opened_s, grown


def private_bytes(process: int | str = "self") -> int:
    """Return the bytes of a process's memory that no other process maps (Linux)."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
