"""`tresnet bench`: throughput and peak memory of models side by side."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import subcommand

from tresnet.cli.bench_loader import BenchLoader
from tresnet.cli.bench_max_batch import BenchMaxBatch
from tresnet.cli.bench_ops import BenchOps
from tresnet.cli.bench_options import ModelOptions
from tresnet.cli.bench_report import BenchReport
from tresnet.cli.bench_rewrites import BenchBranches, BenchConvs
from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from tresnet.measure.cases import BenchCase
    from tresnet.measure.results import BenchRow, BenchSettings

PARTLY_FAILED_EXIT_CODE = 1


@dataclasses.dataclass(frozen=True)
class _Options(ModelOptions):
    batch_size: tuple[int, ...] = (64,)
    """Images a step; several give one case each."""

    warmup_steps: int = 10
    """Untimed steps of each case, compilation included."""

    rounds: int = 5
    """Visits to each case; every round visits every case."""

    steps: int = 10
    """Timed steps of each visit."""

    sequential: bool = False
    """Finish and free each case before the next is built, instead of taking turns: for cases that
    do not fit on the device together. Ratios are then not reported."""

    time_limit_s: float | None = None
    """Begin no case after three quarters of this time, and end with what is measured by then; a case
    that is being compiled is not interrupted."""

    def prepare(self) -> "BenchSettings":
        """The settings, checked like the directory of the record."""
        from tresnet.measure.records import check_directory
        from tresnet.measure.results import BenchSettings

        settings = BenchSettings(
            device=self.resolved_device(),
            warmup_steps=self.warmup_steps,
            rounds=self.rounds,
            steps_per_round=self.steps,
            interleave=not self.sequential,
            time_limit_s=self.time_limit_s,
        )
        check_directory(self.output_dir)
        return settings


@dataclasses.dataclass(frozen=True)
class BenchTrain(_Options):
    """Time training steps on synthetic images: forward, loss, backward, SGD with momentum."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        return _measure("bench_train", self.cases(self.batch_size), self, argv)


@dataclasses.dataclass(frozen=True)
class BenchInfer(_Options):
    """Time forward passes on synthetic images."""

    cast: Literal["pure", "autocast"] = "pure"
    """How 16 bits are reached: weights and images converted, or autocast over fp32 weights."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        return _measure("bench_infer", self.cases(self.batch_size, self.cast), self, argv)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure images per second (p20, p50, p80) and peak memory, and write a record."""

    task: (
        Annotated[BenchTrain, subcommand("train")]
        | Annotated[BenchInfer, subcommand("infer")]
        | Annotated[BenchMaxBatch, subcommand("max-batch")]
        | Annotated[BenchOps, subcommand("ops")]
        | Annotated[BenchLoader, subcommand("loader")]
        | Annotated[BenchBranches, subcommand("branches")]
        | Annotated[BenchConvs, subcommand("convs")]
        | Annotated[BenchReport, subcommand("report")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen measurement."""
        return self.task.run(argv)


def _measure(what: str, cases: "list[BenchCase]", options: _Options, argv: list[str]) -> int:
    """Measure, print the table and write the record, of an interrupted run too."""
    from tresnet.measure import bench
    from tresnet.measure.results import BenchInterrupt

    settings = options.prepare()
    try:
        rows = getattr(bench, what)(cases, settings, log=progress)
    except BenchInterrupt as stop:
        _report(what, stop.rows, settings, options.output_dir, argv)
        raise
    return _report(what, rows, settings, options.output_dir, argv)


def _report(
    what: str,
    rows: "Sequence[BenchRow]",
    settings: "BenchSettings",
    directory: Path,
    argv: Sequence[str],
) -> int:
    from tresnet.measure.bench import method_of
    from tresnet.measure.records import write_record

    say(_table(rows))
    path = write_record(
        directory,
        what,
        device=settings.device,
        settings={**dataclasses.asdict(settings), "method": method_of(what)},
        rows=[row.to_dict() for row in rows],
        warmup_steps=settings.warmup_steps,
        runs=settings.rounds * settings.steps_per_round,
        argv=["tresnet", *argv],
    )
    progress(f"record: {path}")
    return 0 if all(row.status == "ok" for row in rows) else PARTLY_FAILED_EXIT_CODE


def _table(rows: "Sequence[BenchRow]") -> str:
    header = [
        "case",
        "size",
        "p20 img/s",
        "p50 img/s",
        "p80 img/s",
        "x first",
        "peak MiB",
        "status",
    ]
    lines = []
    for row in rows:
        speed, memory = row.speed, row.memory
        peak_mib = None
        if memory is not None:
            on_cpu = memory.max_allocated_mib is None
            peak_mib = memory.rss_peak_mib if on_cpu else memory.max_allocated_mib
        lines.append(
            [
                row.case.label(),
                str(row.case.input_size or "-"),
                _cell(speed and speed.p20_images_per_s, 1),
                _cell(speed and speed.p50_images_per_s, 1),
                _cell(speed and speed.p80_images_per_s, 1),
                _cell(row.ratio_to_first, 3),
                _cell(peak_mib, 1),
                row.status,
            ]
        )
    return format_table(header, lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
