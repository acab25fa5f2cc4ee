"""`tresnet bench`: speed and peak memory of models, operations and loaders side by side."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import subcommand

from tresnet.cli.output import finish, format_table, progress, say
from tresnet.measure.cases import Cases
from tresnet.measure.settings import LargestSettings, LoaderSettings, OpsSettings, StepSettings

if TYPE_CHECKING:
    from tresnet.measure.runner import Outcome

BEGIN = "<!-- tresnet bench report: begin -->"
END = "<!-- tresnet bench report: end -->"
NO_GPU = "No record of a GPU exists yet: this project has had none to measure on."


@dataclasses.dataclass(frozen=True)
class _BenchSteps(StepSettings, Cases):
    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.models import bench_models

        training = isinstance(self, BenchTrain)
        return _show(bench_models(training, self.cases(), self, argv, progress), _STEP_TABLE)


class BenchTrain(_BenchSteps):
    """Time the training step of train.py on synthetic images: forward, loss, backward, update."""


class BenchInfer(_BenchSteps):
    """Time the inference step of eval.py on synthetic images."""


@dataclasses.dataclass(frozen=True)
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


class BenchLoader(LoaderSettings):
    """Time data loaders in turns: ours, timm's, torchvision's and, where installed, DALI's."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.loaders import bench_loaders

        return _show(bench_loaders(self, argv, progress), _LOADER_TABLE)


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Draw tables and pictures from records; a section for each device and PyTorch version."""

    records: Path = Path("benchmarks/records")
    """Folder of the records."""

    into: Path | None = None
    """Markdown file whose text between the two marker comments is replaced by the records of GPUs;
    by default the whole report is printed."""

    pictures: Path | None = None
    """Existing folder for pictures of images/s against top-1. By default none are drawn."""

    picture_format: Literal["svg", "png"] = "svg"
    """Format of the pictures."""

    def run(self, argv: list[str]) -> int:
        """Read the records, draw the pictures, write the tables."""
        from tresnet.errors import InputError
        from tresnet.measure.report import (
            read_records,
            replace_between,
            section_markdown,
            sections,
        )

        if self.pictures is not None and not self.pictures.is_dir():
            raise InputError(f"expected an existing folder, got {self.pictures}: create it first")
        records = read_records(self.records, progress)
        if self.into is not None:
            records = [record for record in records if record.on_gpu]
        text = "\n\n".join(section_markdown(one, self._links(one)) for one in sections(records))
        if self.into is None:
            say(text)
        else:
            replace_between(self.into, BEGIN, END, f"\n\n{text or NO_GPU}\n\n")
            progress(f"report: {self.into}")
        return 0

    def _links(self, section: Any) -> list[str]:
        """Draw a section's picture and return its Markdown, relative to the file it goes into."""
        from tresnet.measure.report import draw_picture

        if self.pictures is None or not (
            path := draw_picture(section, self.pictures, self.picture_format)
        ):
            return []
        progress(f"picture: {path}")
        base = Path.cwd() if self.into is None else self.into.resolve().parent
        relative = Path(os.path.relpath(path.resolve(), base)).as_posix()
        return [f"![speed, {section[0].title}]({relative})"]


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure images per second (p20, p50, p80) and peak memory, and write a record."""

    task: (
        Annotated[BenchTrain, subcommand("train")]
        | Annotated[BenchInfer, subcommand("infer")]
        | Annotated[BenchMaxBatch, subcommand("max-batch")]
        | Annotated[BenchOps, subcommand("ops")]
        | Annotated[BenchLoader, subcommand("loader")]
        | Annotated[BenchReport, subcommand("report")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen measurement."""
        return self.task.run(argv)


# Of each table: the header, the column of the row, and how to write a number.
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
    ("x copy", "share_of_copy", ".3f"),
]
_LOADER_TABLE: _Table = [
    ("batch bytes", "batch_bytes", ""),
    ("p50 img/s", "p50_images_per_s", ".1f"),
    ("x first", "ratio_to_first", ".3f"),
    ("slowest", "least_images_per_s", ".1f"),
    ("fastest", "most_images_per_s", ".1f"),
]


def _show(outcome: "Outcome", table: _Table) -> int:
    """Print the rows and the rest of what is to say, and return the exit code."""
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
        value = row.get("rss_peak_mib")  # all there is on a CPU
    return "-" if value is None else format(value, how)
