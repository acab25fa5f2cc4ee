"""`tresnet memory`: predict and measure the GPU memory of a step; find the largest batch."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, arg, subcommand

from tresnet.cli.output import PARTLY_FAILED_EXIT_CODE, finish, format_table, progress, say
from tresnet.measure.cases import Cases
from tresnet.measure.settings import RunSettings
from tresnet.settings import Input, InputSize, ModelStep
from tresnet.settings.fields import Positive, Settings, Size, flatten


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryMaxBatch(Settings):
    """Predict the largest batch that fits, without a GPU."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model of `tresnet list`, timm:NAME or torchvision:NAME."""
    step: ModelStep = dataclasses.field(default_factory=ModelStep)
    input_size: InputSize = None
    input: Input = "float"
    infer: bool = False
    """Predict an inference step, not a training step."""
    ddp: bool = False
    """Add the memory from which several processes exchange gradients."""
    gpu_memory: str | None = None
    """Memory of the GPU, such as 80GiB. None: the whole memory of the GPU that --gpu names."""
    gpu: str | None = None
    """Name of the GPU: a100, h100, h200, rtx3090, rtx4090 or v100. None: this machine's GPU, or an
    assumed one of compute capability 8.0."""

    def arguments(self) -> dict[str, Any]:
        return {
            **flatten(self.step),
            "input_size": self.input_size,
            "input": self.input,
            "train": not self.infer,
            "ddp": self.ddp,
            "gpu_memory": self.gpu_memory,
            "device": self.gpu,
        }

    def run(self, argv: list[str]) -> int:
        """Print which batches fit and which do not; return 1 if not even one image fits."""
        from tresnet.memory import max_batch

        largest = max_batch(self.model, **self.arguments())
        say(str(largest))
        return 0 if largest.no_from > 1 else PARTLY_FAILED_EXIT_CODE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPredict(MemoryMaxBatch):
    """Predict the peak memory of a step, without a GPU."""

    batch_size: Size = 64
    """Number of images in a micro-batch."""
    snapshot: Path | None = None
    """File for the memory over time, which PyTorch's viewer shows (pytorch.org/memory_viz)."""
    json: bool = False
    """Print the prediction as JSON."""

    def run(self, argv: list[str]) -> int:
        from tresnet.memory import predict
        from tresnet.memory.snapshot import write_snapshot

        predicted = predict(self.model, batch_size=self.batch_size, **self.arguments())
        if self.snapshot is not None:
            progress(f"snapshot: {write_snapshot(predicted, self.snapshot)}")
        say(json.dumps(predicted.to_dict()) if self.json else str(predicted))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryMeasure(RunSettings, Cases):
    """Measure the memory of each case in a new process, in phases such as model and train."""

    rounds: Suppress[int] = 0
    infer: bool = False
    """Measure inference instead of training."""
    case_limit_s: Positive | None = 300.0
    """Time limit of each case in seconds."""

    def run(self, argv: list[str]) -> int:
        from tresnet.measure.phases import measure_memory

        outcome = measure_memory(not self.infer, self.cases(), self, argv, progress)
        columns = ["allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib",
                   "rss_peak_mib"]  # fmt: skip
        lines = [
            [row["model"], str(row["batch_size"]), phase]
            + ["-" if values[c] is None else f"{values[c]:.1f}" for c in columns]
            for row in outcome.rows
            for phase, values in (row["phases"] or {}).items()
        ]
        say(format_table(["model", "batch", "phase", *columns], lines))
        return finish(outcome)


Memory = (
    Annotated[MemoryPredict, subcommand("predict")]
    | Annotated[MemoryMeasure, subcommand("measure")]
    | Annotated[MemoryMaxBatch, subcommand("max-batch")]
)
