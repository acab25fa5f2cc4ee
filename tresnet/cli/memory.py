"""`tresnet memory`: predict, measure and compare the GPU memory of a step; find the largest batch."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from tresnet.cli.memory_compare import MemoryCompare
from tresnet.cli.memory_max_batch import MemoryMaxBatch
from tresnet.cli.memory_options import (
    PARTLY_FAILED_EXIT_CODE,
    GpuOptions,
    Measured,
    StepOptions,
    cell,
)
from tresnet.cli.memory_workspaces import MemoryWorkspaces
from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from tresnet.memory import Prediction


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
class MemoryMeasure(Measured):
    """Measure memory by phase, each case in a fresh process."""

    def run(self, argv: list[str]) -> int:
        """Print one line a phase and write a record."""
        self.check()
        rows = [{**dataclasses.asdict(c), **self.measured(c)} for c in self.cases()]
        columns = ["allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib",
                   "rss_peak_mib"]  # fmt: skip
        lines = [
            [row["name"], phase, *(cell(values[c]) for c in columns)]
            for row in rows
            for phase, values in row.get("phases", {}).items()
        ]
        if lines:
            say(format_table(["case", "phase", *columns], lines))
        self.write("memory", rows, argv)
        return PARTLY_FAILED_EXIT_CODE if any("error" in row for row in rows) else 0


@dataclasses.dataclass(frozen=True)
class Memory:
    """Predict, measure and compare the GPU memory of a training step or an inference."""

    command: (
        Annotated[MemoryPredict, subcommand("predict")]
        | Annotated[MemoryMeasure, subcommand("measure")]
        | Annotated[MemoryMaxBatch, subcommand("max-batch")]
        | Annotated[MemoryCompare, subcommand("compare")]
        | Annotated[MemoryWorkspaces, subcommand("workspaces")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen one."""
        return self.command.run(argv)


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
