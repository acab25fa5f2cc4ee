"""`tresnet bench loader`: images per second of the data loader, bytes against floats and timm's."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from tresnet.measure.loaders import LoaderRow, LoaderSettings


@dataclasses.dataclass(frozen=True)
class BenchLoader:
    """Time data loaders in turns: ours giving bytes, ours giving floats, and timm's."""

    data: Path | None = None
    """Directory with train/CLASS/ or val/CLASS/ image folders; by default 64 JPEGs of 500 x 375
    pixels, made up for the run. Files are read over and over, so from the system's cache."""

    split: Literal["train", "val"] = "train"
    """train: random crop and mirror image. val: resize and center crop."""

    batch_size: int = 64
    """Images in a batch."""

    input_size: int = 224
    """Side of the square image in pixels."""

    workers: int = 2
    """Processes that load, at most one a core; 0 loads in the main process."""

    rounds: int = 5
    """Visits to each loader; every round visits every loader."""

    batches: int = 8
    """Timed batches of each visit."""

    warmup_batches: int = 4
    """Untimed batches before them."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written; an existing record is never overwritten."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.loaders import LoaderSettings, compare_loaders
        from tresnet.measure.records import check_directory

        settings = LoaderSettings(
            self.batch_size,
            self.input_size,
            self.workers,
            self.rounds,
            self.batches,
            self.warmup_batches,
        )
        check_directory(self.output_dir)
        with self._images() as folder, self._loaders(folder, settings) as loaders:
            rows = compare_loaders(loaders, settings, log=progress)
        _print(rows)
        return self._write(rows, settings, argv)

    @contextlib.contextmanager
    def _images(self) -> Iterator[Path]:
        """The folder that was given, or one that is there for the run alone."""
        from tresnet.data.contenders import write_jpegs

        if self.data is not None:
            yield self.data
            return
        with tempfile.TemporaryDirectory() as folder:
            write_jpegs(Path(folder), self.split)
            yield Path(folder)

    @contextlib.contextmanager
    def _loaders(self, folder: Path, settings: "LoaderSettings") -> Iterator[dict[str, Any]]:
        """What is compared; the workers are stopped in the end."""
        import torch

        from tresnet.data.contenders import TimmLoader, our_loader

        shared: dict[str, Any] = {
            "length": settings.epoch_images,
            "batch_size": settings.batch_size,
            "size": settings.input_size,
            "workers": settings.workers,
        }
        loaders = {
            "tresnet, uint8": our_loader(folder, self.split, torch.uint8, **shared),
            "tresnet, float": our_loader(folder, self.split, torch.float32, **shared),
            "timm, float": TimmLoader(folder, self.split, **shared),
        }
        try:
            yield loaders
        finally:
            for loader in loaders.values():
                loader.close()

    def _write(
        self, rows: "Sequence[LoaderRow]", settings: "LoaderSettings", argv: list[str]
    ) -> int:
        from tresnet.data.contenders import JPEG_SIZE, JPEGS
        from tresnet.measure.records import write_record

        made_up = f"{JPEGS} made-up JPEGs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}"
        path = write_record(
            self.output_dir,
            "bench_loader",
            device=None,
            settings={
                **dataclasses.asdict(settings),
                "split": self.split,
                "data": made_up if self.data is None else self.data.resolve().name,
                "method": {
                    "order": "every round visits every loader, forwards and backwards in turn",
                    "timed": "from the last warm-up batch to the last batch of an epoch",
                    "timm": "create_dataset and create_loader without the prefetcher; it divides "
                    "by a deviation of 1, which its API cannot leave out",
                },
            },
            rows=[dataclasses.asdict(row) for row in rows],
            warmup_steps=settings.warmup_batches,
            runs=settings.rounds,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")
        return 0


def _print(rows: "Sequence[LoaderRow]") -> None:
    header = ["loader", "MiB/batch", "p50 img/s", "x first", "slowest", "fastest"]
    cells = [
        [
            row.case,
            f"{row.batch_bytes / 2**20:.2f}",
            f"{row.p50_images_per_s:.1f}",
            f"{row.ratio_to_first:.3f}",
            f"{min(row.round_images_per_s):.1f}",
            f"{max(row.round_images_per_s):.1f}",
        ]
        for row in rows
    ]
    say(format_table(header, cells))
