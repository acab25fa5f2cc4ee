#!/usr/bin/env python3
"""Measure the time and memory of opening a Hugging Face data set of many rows; write a record.

    python benchmarks/open_rows.py --rows 14000000

All rows have the same image of a few bytes, in batches of 100 rows, as `datasets` stores images. A
fresh process opens the data set, after all imports. Only private memory counts: it leaves out
unchanged pages of mapped files, which other processes may share.
"""

import dataclasses
import io
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Suppress

from tresnet.cli import shell
from tresnet.cli.output import say
from tresnet.data.sources import open_split
from tresnet.errors import needed
from tresnet.measure.records import RecordFile, check_directory
from tresnet.measure.settings import RoundCount, RunSettings
from tresnet.settings.fields import Count

BATCH = 100  # rows; the default of `datasets` for images


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """Options of the measurement; each round opens the data set in a fresh process."""

    rounds: RoundCount = 5
    device: Suppress[str] = "cpu"
    rows: Count = 14_000_000
    """Number of images."""


def write_rows(out: Path, rows: int) -> None:
    """Write `rows` images (rounded down to hundreds) as `save_to_disk` would, in one file."""
    from PIL import Image

    with needed("open_rows.py", "hf"):
        import datasets
        import pyarrow as pa
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, "PNG")
    columns = {"image": [{"bytes": png.getvalue(), "path": "0.png"}] * BATCH, "label": [0, 1] * 50}
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=2)}
    small = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    small.save_to_disk(out)
    (file,) = out.glob("*.arrow")
    (batch,) = pa.ipc.open_stream(file.read_bytes())
    with pa.ipc.new_stream(file, batch.schema) as target:
        for _ in range(rows // BATCH):
            target.write_batch(batch)


def opening(out: Path) -> dict[str, Any]:
    """Open a data set in this process; return its length, the seconds, and MB of private memory."""
    import datasets  # noqa: F401  imported before the measurement
    import pyarrow  # noqa: F401

    before, begin = private_bytes(), time.perf_counter()
    dataset = open_split(str(out), "train")
    opened_s = time.perf_counter() - begin
    grown = private_bytes() - before
    dataset[len(dataset) - 1]
    return {"rows": len(dataset), "open_s": opened_s, "private_mb": grown / 1e6}


def private_bytes(process: int | str = "self") -> int:
    """Return the bytes of a process's memory that no other process maps (Linux)."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main(settings: Settings) -> int:
    """Write the data set, open it in each round, print the figures and write the record."""
    settings.check()
    check_directory(settings.output_dir)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "rows")
        write_rows(out, settings.rows)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            rows = [pool.apply(opening, (out,)) for _ in range(settings.rounds)]
    for row in rows:
        say(f"{row['rows']} rows: {row['open_s']:.2f} s, {row['private_mb']:.0f} MB")
    options = {"device": None, "settings": settings.to_dict(), "runs": settings.rounds}
    RecordFile(settings.output_dir, "open_rows", **options).write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(shell.run(lambda: main(tyro.cli(Settings, description=__doc__))))
