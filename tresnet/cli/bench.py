"""`tresnet bench`: speed and peak memory of models and operations side by side."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import subcommand

from tresnet.cli.output import finish, format_table, progress, say
from tresnet.measure.cases import Cases
from tresnet.measure.settings import LargestSettings, OpsSettings, StepSettings

if TYPE_CHECKING:
    from tresnet.measure.runner import Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BenchSteps(StepSettings, Cases):
    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.models import bench_models

        training = isinstance(self, BenchTrain)
        return _show(bench_models(training, self.cases(), self, argv, progress), _STEP_TABLE)


class BenchTrain(_BenchSteps):
    """Time the training step of train.py on synthetic images, optimizer included."""


class BenchInfer(_BenchSteps):
    """Time the inference step of eval.py on synthetic images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchMaxBatch(LargestSettings, Cases):
    """Find the largest training batch that fits, by real steps."""

    def run(self, argv: list[str]) -> int:
        """Search, print the table and write the record."""
        from tresnet.measure.largest_batch import largest_batches

        return _show(largest_batches(self.cases(), self, argv, progress), _LARGEST_TABLE)


class BenchOps(OpsSettings):
    """Time the fused operations of a tresnet_m, forward and backward apart, and their bandwidth."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.bench_ops import bench_ops

        return _show(bench_ops(self, argv, progress), _OPS_TABLE)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure images per second (p20, p50, p80) and peak memory, and write a record."""

    task: (
        Annotated[BenchTrain, subcommand("train")]
        | Annotated[BenchInfer, subcommand("infer")]
        | Annotated[BenchMaxBatch, subcommand("max-batch")]
        | Annotated[BenchOps, subcommand("ops")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen measurement."""
        return self.task.run(argv)


# Columns of a table: title, column of the row, and format of the number.
_Table = list[tuple[str, str, str]]
_STEP_TABLE: _Table = [
    ("size", "input_size", ""),
    ("p20 img/s", "p20_images_per_s", ".1f"),
    ("p50 img/s", "p50_images_per_s", ".1f"),
    ("p80 img/s", "p80_images_per_s", ".1f"),
    ("x first", "ratio_to_first", ".3f"),
    ("peak MiB", "max_allocated_mib", ".1f"),
]
_LARGEST_TABLE: _Table = [
    ("largest batch", "largest_batch", ""),
    ("ended by", "limited_by", ""),
    ("peak MiB", "max_allocated_mib", ".1f"),
]
_OPS_TABLE: _Table = [
    ("p50 us", "p50_us", ".1f"),
    ("GB/s", "gb_per_s", ".1f"),
    ("x copy", "ratio_to_copy", ".3f"),
]


def _show(outcome: "Outcome", table: _Table) -> int:
    header = ["case", *(title for title, _, _ in table), "status"]
    lines = [
        [label, *(_cell(row, column, how) for _, column, how in table), row["status"]]
        for label, row in zip(outcome.labels, outcome.rows, strict=True)
    ]
    say(format_table(header, lines))
    return finish(outcome)


def _cell(row: dict[str, Any], column: str, how: str) -> str:
    value = row.get(column)
    if value is None and column == "max_allocated_mib":
        value = row.get("rss_peak_mib")  # the only figure on a CPU
    return "-" if value is None else format(value, how)
