"""`tresnet memory`: predict and measure the GPU memory of a step; find the largest batch."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from tresnet.cli.output import finish, format_table, progress, say
from tresnet.measure.cases import Cases
from tresnet.measure.settings import PhaseSettings
from tresnet.settings import CompileMode, ModelStep
from tresnet.settings.fields import Settings, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EagerStep(ModelStep):
    compile: CompileMode = "none"
    """Only none: the memory of compiled models is not predicted."""
    cuda_graph: Literal["off", "on", "auto"] = "auto"
    """Only off or auto: the memory of graphs is not predicted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Predicted(Settings):
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Model: ours (tresnet_m), timm:NAME or torchvision:NAME."""
    step: _EagerStep = dataclasses.field(default_factory=_EagerStep)
    infer: bool = False
    """Inference instead of training."""
    ddp: bool = False
    """Add DistributedDataParallel's gradient buckets."""
    gpu_memory: str | None = None
    """The GPU's memory, such as 80GiB."""
    gpu: str | None = None
    """The GPU: a100, h100, h200, rtx3090, rtx4090 or v100; by default that of this machine."""

    def arguments(self) -> dict[str, Any]:
        return {
            **vars(self.step),
            "train": not self.infer,
            "ddp": self.ddp,
            "gpu_memory": self.gpu_memory,
            "device": self.gpu,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPredict(_Predicted):
    """Predict the peak memory of a step, without a GPU."""

    batch_size: Size = 64
    """Images of a micro-batch."""
    snapshot: Path | None = None
    """Also write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz)."""
    plot: Path | None = None
    """Also draw the timeline: .png, .svg or .pdf."""
    json: bool = False
    """Print JSON."""

    def run(self, argv: list[str]) -> int:
        """Print the prediction; write the picture and the snapshot if requested."""
        from tresnet.memory import predict
        from tresnet.memory.plot import plot
        from tresnet.memory.snapshot import write_snapshot

        predicted = predict(self.model, batch_size=self.batch_size, **self.arguments())
        say(json.dumps(predicted.to_dict()) if self.json else str(predicted))
        if self.plot is not None:
            progress(f"picture: {plot(predicted, self.plot)}")
        if self.snapshot is not None:
            progress(f"snapshot: {write_snapshot(predicted, self.snapshot)}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryMaxBatch(_Predicted):
    """Find the largest batch that fits, without a GPU."""

    def run(self, argv: list[str]) -> int:
        """Print the largest batches."""
        from tresnet.memory import max_batch

        say(str(max_batch(self.model, **self.arguments())))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryMeasure(PhaseSettings, Cases):
    """Measure memory by phase, each case in a fresh process."""

    def run(self, argv: list[str]) -> int:
        """Print one line per phase and write a record."""
        from tresnet.measure.phases import measure_memory

        outcome = measure_memory(self.cases(), self, argv, progress)
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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Predict and measure the GPU memory of a training step or an inference."""

    task: (
        Annotated[MemoryPredict, subcommand("predict")]
        | Annotated[MemoryMeasure, subcommand("measure")]
        | Annotated[MemoryMaxBatch, subcommand("max-batch")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen task."""
        return self.task.run(argv)
