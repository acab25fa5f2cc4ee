"""`tresnet bench`: speed and peak memory of models, operations and loaders side by side."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from tresnet.cli.output import format_table, progress, say
from tresnet.measure.cases import CaseSettings

if TYPE_CHECKING:
    from tresnet.measure.cases import BenchCase
    from tresnet.measure.records import RecordFile
    from tresnet.measure.runner import Outcome

PARTLY_FAILED_EXIT_CODE = 1
BEGIN = "<!-- tresnet bench report: begin -->"
END = "<!-- tresnet bench report: end -->"
NO_GPU = "No record of a GPU exists yet: this project has had none to measure on."


@dataclasses.dataclass(frozen=True)
class _Options:
    """What every measurement is told."""

    device: str | None = None
    """Such as cuda, cuda:1 or cpu; by default a GPU if there is one."""

    time_limit_s: float | None = None
    """Begin nothing after three quarters of this time (max-batch: share it out), and end with what is
    measured by then."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written, after each case; an existing record is never overwritten."""

    def resolved_device(self) -> str:
        """What was asked for, else a GPU, else the CPU."""
        from tresnet.env import device_or_default

        return device_or_default(self.device)

    def to(self, argv: list[str]) -> dict[str, Any]:
        """Where the record and the progress go."""
        return {
            "output_dir": self.output_dir,
            "argv": ["tresnet", *argv],
            "log": progress,
        }


@dataclasses.dataclass(frozen=True)
class _ModelOptions(_Options, CaseSettings):
    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """Ours (tresnet_m), timm:NAME or torchvision:NAME. A model may have its own settings, by the names
    of the options: tresnet_m@norm=inplace_abn,amp=fp16 or timm:resnet50@compile=default."""

    batch_sizes: Annotated[tuple[int, ...], arg(name="batch-size")] = (64,)
    """Images a step; several give one case each."""

    def cases(self) -> "list[BenchCase]":
        """Every model at every batch size."""
        from tresnet.measure.cases import parse_cases

        return parse_cases(self.models, self, self.batch_sizes)


@dataclasses.dataclass(frozen=True)
class _StepOptions(_ModelOptions):
    warmup_steps: int = 10
    """Untimed steps of each case, compilation included."""

    rounds: int = 5
    """Visits to each case; every round visits every case."""

    steps: int = 10
    """Timed steps of each visit."""

    sequential: bool = False
    """Finish and free each case before the next is built, instead of taking turns: for cases that
    do not fit on the device together. Ratios are then not reported."""

    case_limit_s: float | None = None
    """Give up a case whose set-up and first round, or a later round, takes longer."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.models import BenchSettings, bench_models

        settings = BenchSettings(
            rounds=self.rounds,
            time_limit_s=self.time_limit_s,
            case_limit_s=self.case_limit_s,
            device=self.resolved_device(),
            warmup_steps=self.warmup_steps,
            steps_per_round=self.steps,
            interleave=not self.sequential,
        )
        training = isinstance(self, BenchTrain)
        outcome, record = bench_models(training, self.cases(), settings, **self.to(argv))
        return _show(outcome, record, _STEP_TABLE)


class BenchTrain(_StepOptions):
    """Time the training step of train.py on synthetic images: forward, loss, backward, update."""


class BenchInfer(_StepOptions):
    """Time the inference step of eval.py on synthetic images."""


@dataclasses.dataclass(frozen=True)
class BenchMaxBatch(_ModelOptions):
    """Find the largest training batch that fits, by real steps."""

    first: int = 64
    """The batch tried first."""

    granularity: int = 16
    """The answer is a multiple of this."""

    at_most: int | None = None
    """Try no larger batch; needed on a CPU."""

    memory_gib: float | None = None
    """Give PyTorch's allocator no more than this, so that a larger GPU stands for a smaller one; the
    CUDA context, about half a GiB, comes on top."""

    def run(self, argv: list[str]) -> int:
        """Search, print the table and write the record."""
        from tresnet.measure.largest_batch import LargestSettings, largest_batches

        settings = LargestSettings(
            self.resolved_device(),
            self.first,
            self.granularity,
            self.at_most,
            self.memory_gib,
            time_limit_s=self.time_limit_s,
        )
        outcome, record = largest_batches(self.cases(), settings, **self.to(argv))
        return _show(outcome, record, _LARGEST_TABLE)


@dataclasses.dataclass(frozen=True)
class BenchOps(_Options):
    """Time the fused operations of a tresnet_m, forward and backward apart, and their bandwidth."""

    ops: Annotated[Positional[tuple[str, ...]], arg(metavar="[OP ...]")] = ()
    """abn_join, abn, abn_blur, abn_se, blur, stem; by default all."""

    batch_size: int = 128
    """Images in a batch."""

    input_size: int = 224
    """Side of the image in pixels, divisible by 32; the feature maps follow from it."""

    dtype: tuple[Literal["fp32", "bf16", "fp16"], ...] = ()
    """Of the feature maps, one or several; by default bf16 on a GPU and fp32 on a CPU."""

    contenders: tuple[str, ...] = ()
    """Out of eager, inductor, reference and triton; by default all that an operation has.
    triton@warps=8,tile=4096 cuts the kernels' work otherwise: tile, blur_tile, warps, programs,
    most_tiles."""

    rounds: int = 20
    """Timed passes of each contender."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.bench_ops import OpsSettings, bench_ops
        from tresnet.measure.runner import RunSettings

        settings = OpsSettings(
            self.resolved_device(),
            self.dtype,
            self.batch_size,
            self.input_size,
            contenders=self.contenders,
        )
        running = RunSettings(self.rounds, self.time_limit_s)
        outcome, record = bench_ops(self.ops, settings, running, **self.to(argv))
        return _show(outcome, record, _OPS_TABLE)


@dataclasses.dataclass(frozen=True)
class BenchLoader:
    """Time data loaders in turns: ours, timm's and torchvision's."""

    data: Path | None = None
    """Directory with train/CLASS/ or val/CLASS/ image folders; by default 64 JPEGs of 500 x 375
    pixels, cut from scikit-learn's photographs. Files are read over and over, so from the system's cache."""

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

    time_limit_s: float | None = None
    """Begin no loader after three quarters of this time, and end with what is measured by then."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written, after each loader; an existing record is never overwritten."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.data.contenders import loaders_in
        from tresnet.measure.loaders import LoaderSettings, compare_loaders

        settings = LoaderSettings(
            rounds=self.rounds,
            time_limit_s=self.time_limit_s,
            batch_size=self.batch_size,
            input_size=self.input_size,
            workers=self.workers,
            batches=self.batches,
            warmup_batches=self.warmup_batches,
        )
        shared = {
            "length": settings.epoch_images,
            "batch_size": self.batch_size,
            "size": self.input_size,
            "workers": self.workers,
        }
        with _images(self.data, self.split) as (folder, data):
            outcome, record = compare_loaders(
                loaders_in(folder, self.split, **shared),
                settings,
                about={"split": self.split, "data": data},
                output_dir=self.output_dir,
                argv=["tresnet", *argv],
                log=progress,
            )
        return _show(outcome, record, _LOADER_TABLE)


@contextlib.contextmanager
def _images(data: Path | None, split: Literal["train", "val"]) -> Iterator[tuple[Path, str]]:
    """The folder that was given, or one that is there for the run alone; and what to call it."""
    from tresnet.data.contenders import JPEG_SIZE, JPEGS, write_jpegs

    if data is not None:
        yield data, data.resolve().name
        return
    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(Path(folder), split)
        yield Path(folder), f"{JPEGS} photographs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}, JPEG"


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Draw tables and pictures from records; a section for each device and PyTorch version."""

    records: Path = Path("benchmarks/records")
    """Folder of the records."""

    into: Path | None = None
    """Markdown file whose text between the two marker comments is replaced by the records of GPUs;
    by default the whole report is printed."""

    pictures: Path | None = None
    """Existing folder for the pictures: images/s against ImageNet top-1, and memory against batch
    size. By default none are drawn."""

    picture_format: Literal["svg", "png"] = "svg"
    """Format of the pictures."""

    def run(self, argv: list[str]) -> int:
        """Read the records, draw the pictures, write the tables."""
        from tresnet.errors import InputError
        from tresnet.measure.report import drawable, replace_between, section_markdown, sections

        if self.pictures is not None and not self.pictures.is_dir():
            raise InputError(f"expected an existing folder, got {self.pictures}: create it first")
        records = drawable(self.records, progress)
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
        """Draw a section's pictures and return their Markdown, relative to the file it goes into."""
        from tresnet.measure.report_pictures import draw_pictures

        if self.pictures is None:
            return []
        base = Path.cwd() if self.into is None else self.into.resolve().parent
        links = []
        for path in draw_pictures(section, self.pictures, self.picture_format):
            relative = Path(os.path.relpath(path.resolve(), base)).as_posix()
            links.append(f"![{path.name.partition('_')[0]}, {section[0].title}]({relative})")
            progress(f"picture: {path}")
        return links


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


def _show(outcome: "Outcome", record: "RecordFile", table: _Table) -> int:
    """Print the rows and where they are recorded, and return the exit code."""
    header = ["case", *(title for title, _, _ in table), "status"]
    lines = [
        [label, *(_cell(row, column, how) for _, column, how in table), row["status"]]
        for label, row in zip(outcome.labels, outcome.rows, strict=True)
    ]
    say(format_table(header, lines))
    notes: dict[str, str] = {}
    for label, row in zip(outcome.labels, outcome.rows, strict=True):
        for note in filter(None, (row["error"], row.get("note"))):
            notes.setdefault(note, label)
    for note, label in notes.items():
        progress(f"{label}: {note}")
    progress(f"record: {record.path}")
    if outcome.interrupted:
        raise KeyboardInterrupt
    return 0 if outcome.complete else PARTLY_FAILED_EXIT_CODE


def _cell(row: dict[str, Any], column: str, how: str) -> str:
    value = row.get(column)
    if value is None and column == "max_allocated_mib":
        value = row.get("rss_peak_mib")  # all there is on a CPU
    return "-" if value is None else format(value, how)
