"""`tresnet memory`: predict, measure and compare the GPU memory of a step; find the largest batch."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from tresnet.cli.memory_case import MemoryCase, measure_in_new_process
from tresnet.cli.output import fail, format_table, progress, say
from tresnet.errors import InputError, TResNetError

if TYPE_CHECKING:
    from tresnet.memory import Prediction
    from tresnet.memory.workspaces import Workspaces

PARTLY_FAILED_EXIT_CODE = 1


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What one step is."""

    input_size: tuple[int, ...] = ()
    """Side of the square, or height and width, or channels and all sides; by default the model's."""

    infer: bool = False
    """Inference instead of training."""

    amp: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast dtype; fp32 is none."""

    optimizer: str = "sgd"
    """sgd, sgd_momentum, adamw or another class of torch.optim, in lower case."""

    channels_last: bool = False
    """Store images and weights channels last."""

    accumulation_steps: int = 1
    """Batches whose gradients are summed before the optimizer runs."""

    checkpointing: bool = False
    """Recompute activations, as the model's set_grad_checkpointing chooses."""

    ema: bool = False
    """Keep a moving average of the weights on the GPU."""

    ddp: bool = False
    """Add DistributedDataParallel's gradient buckets; predicted only."""

    norm: Literal["abn", "batchnorm", "inplace_abn"] | None = None
    """Norm of our models; others have their own."""

    def step(self) -> dict[str, Any]:
        """The arguments of `tresnet.memory.predict`, the batch size apart."""
        size = self.input_size
        return {
            "input_size": None if not size else size[0] if len(size) == 1 else size,
            "train": not self.infer,
            "amp": None if self.amp == "fp32" else self.amp,
            "optimizer": self.optimizer,
            "channels_last": self.channels_last,
            "accumulation_steps": self.accumulation_steps,
            "checkpointing": self.checkpointing,
            "ema": self.ema,
            "ddp": self.ddp,
        }

    def model_options(self, model: str) -> dict[str, Any]:
        """Options of a model by name: the norm, for ours."""
        return {"norm": self.norm} if self.norm and ":" not in model else {}


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """The GPU that predictions are for."""

    gpu_memory: str | None = None
    """Its memory, such as 80GiB."""

    gpu: str | None = None
    """Its name: a100, h100, h200, rtx3090, rtx4090 or v100; by default the one that is there."""

    workspaces: Path | None = None
    """A table of cuDNN workspaces measured on it."""

    def keywords(self) -> dict[str, Any]:
        """The arguments of `predict` and `max_batch` that describe it."""
        return {
            "gpu_memory": self.gpu_memory,
            "device": self.gpu,
            "workspaces": self._table(),
        }

    def _table(self) -> "Workspaces | None":
        from tresnet.memory import Workspaces

        return None if self.workspaces is None else Workspaces.load(self.workspaces)


@dataclasses.dataclass(frozen=True)
class MemoryPredict(StepOptions, GpuOptions):
    """Predict the peak memory of a step, without a GPU."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """Ours (tresnet_m), timm:NAME or torchvision:NAME."""

    batch_size: int = 64
    """Images a step."""

    method: Literal["trace", "formula"] = "trace"
    """How: by tracing the step, or by a sum over layers for comparison."""

    page: Path | None = None
    """Also write an HTML page with the timeline and the modules."""

    plot: Path | None = None
    """Also draw the timeline: .png, .svg or .pdf."""

    json: bool = False
    """Print JSON."""

    def run(self, argv: list[str]) -> int:
        """Print the prediction; write what else was asked for."""
        from tresnet.memory import predict
        from tresnet.memory.page import check_page, write_page
        from tresnet.memory.plot import check_plot, plot

        for path, check in ((self.plot, check_plot), (self.page, check_page)):
            if path is not None:
                check(path)
        prediction = predict(
            self.model,
            batch_size=self.batch_size,
            method=self.method,
            model_options=self.model_options(self.model),
            **self.step(),
            **self.keywords(),
        )
        say(json.dumps(_as_json(prediction)) if self.json else str(prediction))
        if self.plot is not None:
            progress(f"picture: {plot(prediction, self.plot)}")
        if self.page is not None:
            progress(f"page: {write_page(prediction, self.page)}")
        return 0


@dataclasses.dataclass(frozen=True)
class MemoryMaxBatch(StepOptions, GpuOptions):
    """Find the largest batch that fits, without a GPU."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """Ours (tresnet_m), timm:NAME or torchvision:NAME."""

    def run(self, argv: list[str]) -> int:
        """Print what fits, what may, and what does not."""
        from tresnet.memory import max_batch

        say(
            str(
                max_batch(
                    self.model,
                    model_options=self.model_options(self.model),
                    **self.step(),
                    **self.keywords(),
                )
            )
        )
        return 0


@dataclasses.dataclass(frozen=True)
class _Measured(StepOptions):
    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """The study's subjects (tensor, cnn, vgg16, resnet50, vit_b_16, unetr), ours, timm:NAME or
    torchvision:NAME; all six subjects by default."""

    batch_size: int = 64
    """Images a step; subjects have their own."""

    device: str = "cuda"
    """Such as cuda or cpu."""

    timeout_s: float = 300
    """Seconds a case may take."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written."""

    def cases(self) -> list[MemoryCase]:
        """One case a model."""
        from tresnet.memory.subjects import SUBJECTS

        names = self.models or ("tensor", *SUBJECTS)
        return [self._case(name, name == "tensor" or name in SUBJECTS) for name in names]

    def _case(self, name: str, is_subject: bool) -> MemoryCase:
        if is_subject:
            return MemoryCase(name, device=self.device)
        step = {**self.step(), "batch_size": self.batch_size}
        return MemoryCase(name, step, self.model_options(name), self.device)

    def measured_on(self) -> str | None:
        """The device of the record.

        Raises:
            InputError: it is a GPU and there is none.
        """
        import torch

        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(
                f"expected a GPU for --device {self.device}, found none: measure on a machine with "
                "one, or check that the command runs with --device cpu"
            )
        return self.device

    def measured(self, case: MemoryCase) -> dict[str, Any]:
        """The case's phases from a fresh process; a failure is reported and kept."""
        progress(f"measuring {case.name}")
        result = measure_in_new_process(case, self.timeout_s)
        if "error" in result:
            fail(f"{case.name}: {result['error']}")
        return result

    def write(self, what: str, rows: list[dict[str, Any]], argv: list[str]) -> None:
        """Write the record."""
        from tresnet.measure.records import write_record

        path = write_record(
            self.output_dir,
            what,
            device=self.measured_on(),
            settings={**self.step(), "batch_size": self.batch_size},
            rows=rows,
            warmup_steps=0,
            runs=1,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")


@dataclasses.dataclass(frozen=True)
class MemoryMeasure(_Measured):
    """Measure memory by phase, each case in a fresh process."""

    def run(self, argv: list[str]) -> int:
        """Print one line a phase and write a record."""
        self.measured_on()
        rows = [{**dataclasses.asdict(c), **self.measured(c)} for c in self.cases()]
        columns = ["allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib",
                   "rss_peak_mib"]  # fmt: skip
        lines = [
            [row["name"], phase, *(_cell(values[c]) for c in columns)]
            for row in rows
            for phase, values in row.get("phases", {}).items()
        ]
        if lines:
            say(format_table(["case", "phase", *columns], lines))
        self.write("memory", rows, argv)
        return PARTLY_FAILED_EXIT_CODE if any("error" in row for row in rows) else 0


@dataclasses.dataclass(frozen=True)
class MemoryCompare(_Measured):
    """Compare predictions with measurements, and with torchinfo and torch's MemTracker."""

    no_measuring: bool = False
    """Predict only; for subjects, compare with what the study measured."""

    def measured_on(self) -> str | None:
        """The device of the record; None where nothing is measured."""
        return None if self.no_measuring else super().measured_on()

    def run(self, argv: list[str]) -> int:
        """Print one line a model and tool, and write a record."""
        self.measured_on()
        rows = [row for case in self.cases() if case.name != "tensor" for row in self._rows(case)]
        say(
            format_table(
                ["case", "by", "peak MiB", "error %", "reserved MiB", "error %", "s", "note"],
                [_line(row) for row in rows],
            )
        )
        self.write("memory_compare", rows, argv)
        return PARTLY_FAILED_EXIT_CODE if any(row["error"] for row in rows) else 0

    def _rows(self, case: MemoryCase) -> list[dict[str, Any]]:
        truth = self._truth(case)
        rows = [_row(case.name, truth["by"], truth, truth)]
        for by, tool in _tools(case).items():
            rows.append(_row(case.name, by, _timed(tool), truth))
        return rows

    def _truth(self, case: MemoryCase) -> dict[str, Any]:
        """What a prediction is compared with: measured now, or by the study."""
        from tresnet.memory.subjects import SUBJECTS

        if self.no_measuring:
            subject = SUBJECTS.get(case.name)
            if subject is None:
                return {"by": "nothing measured", "error": None}
            return {"by": "the study, cleaned", "peak_mib": subject.alone_mib, "error": None}
        result = self.measured(case)
        train = result.get("phases", {}).get("train", {})
        return {
            "by": "measured",
            "peak_mib": train.get("max_allocated_mib"),
            "reserved_mib": train.get("reserved_mib"),
            "error": result.get("error"),
        }


@dataclasses.dataclass(frozen=True)
class Memory:
    """Predict, measure and compare the GPU memory of a training step or an inference."""

    command: (
        Annotated[MemoryPredict, subcommand("predict")]
        | Annotated[MemoryMeasure, subcommand("measure")]
        | Annotated[MemoryMaxBatch, subcommand("max-batch")]
        | Annotated[MemoryCompare, subcommand("compare")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen one."""
        return self.command.run(argv)


def _tools(case: MemoryCase) -> dict[str, Callable[[], dict[str, float]]]:
    """Every tool as a function that gives the peak, and reserved where it knows."""
    from tresnet.memory import predict
    from tresnet.memory.models import find_model
    from tresnet.memory.plan import make_plan
    from tresnet.memory.rivals import RIVALS
    from tresnet.memory.sizes import MIB
    from tresnet.memory.subjects import SUBJECTS

    subject = SUBJECTS.get(case.name)
    source = subject.build if subject else case.name
    step = {**(subject.step if subject else {}), **case.step}

    def ours() -> dict[str, float]:
        predicted = predict(source, model_options=case.model_options, **step)
        return {"peak_mib": predicted.allocated.mib, "reserved_mib": predicted.reserved.mib}

    def by_formula() -> dict[str, float]:
        predicted = predict(source, model_options=case.model_options, method="formula", **step)
        return {"peak_mib": predicted.allocated.mib}

    def by(n_bytes: Callable[..., int]) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            model = find_model(source, case.model_options)[1]
            return {"peak_mib": n_bytes(model, make_plan(model, **step)) / MIB}

        return run

    rivals = {rival.name: by(rival.n_bytes) for rival in RIVALS}
    return {"predicted": ours, "formula": by_formula, **rivals}


def _timed(tool: Callable[[], dict[str, float]]) -> dict[str, Any]:
    import time

    began = time.perf_counter()
    try:
        result: dict[str, Any] = {**tool(), "error": None}
    except TResNetError as error:
        result = {"error": str(error)}
    except Exception as error:
        # Other tools fail in their own ways; the comparison goes on without them.
        result = {"error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": time.perf_counter() - began}


def _row(name: str, by: str, result: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    row = {
        "name": name,
        "by": by,
        "peak_mib": result.get("peak_mib"),
        "reserved_mib": result.get("reserved_mib"),
        "seconds": result.get("seconds"),
        "error": result.get("error"),
    }
    for key in ("peak", "reserved"):
        got, want = row[f"{key}_mib"], truth.get(f"{key}_mib")
        row[f"{key}_error_percent"] = _error_percent(got, want, by == truth["by"])
    return row


def _error_percent(got: float | None, want: float | None, is_truth: bool) -> float | None:
    if is_truth or not got or not want:
        return None
    return 100 * (got / want - 1)


def _line(row: dict[str, Any]) -> list[str]:
    error = " ".join(row["error"].split())[:60] if row["error"] else ""
    return [
        row["name"],
        row["by"],
        _cell(row["peak_mib"]),
        _cell(row["peak_error_percent"]),
        _cell(row["reserved_mib"]),
        _cell(row["reserved_error_percent"]),
        _cell(row["seconds"]),
        error,
    ]


def _as_json(prediction: "Prediction") -> dict[str, Any]:
    """The prediction as plain values, in MiB."""
    estimates = {
        name: {"mib": e.mib, "low_mib": e.band_mib[0], "high_mib": e.band_mib[1]}
        for name, e in (
            ("allocated", prediction.allocated),
            ("reserved", prediction.reserved),
            ("device_total", prediction.device_total),
        )
    }
    mib = 2**20
    return {
        "model": prediction.model,
        "step": prediction.plan.describe(),
        **estimates,
        "by_category_mib": {k.value: n / mib for k, n in prediction.by_category.items()},
        "peak_operation": str(prediction.peak_operation),
        "fits": None
        if prediction.device.capacity_bytes is None
        else prediction.out_of_memory is None,
        "seconds": prediction.seconds,
        "notes": list(prediction.notes),
    }


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
