"""`tresnet memory`: predict and measure the GPU memory of a step; find the largest batch."""

import dataclasses
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc
from tyro.conf import Positional, arg

from tresnet.cli.output import PARTLY_FAILED_EXIT_CODE, finish, format_table, progress, say
from tresnet.measure.cases import BatchSizes, BenchCase, Models, parse_cases
from tresnet.measure.settings import RunSettings
from tresnet.settings import Input, InputSize, ModelStep
from tresnet.settings.fields import Settings, Size, flatten

Model = Annotated[
    Positional[str],
    arg(metavar="MODEL"),
    Doc("A model of `tresnet list`, timm:NAME or torchvision:NAME."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(Settings):
    """The step whose memory is predicted."""

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
        """Return the options by the names that `tresnet.memory` has for them."""
        values = flatten(self)
        return {"train": not values.pop("infer"), "device": values.pop("gpu"), **values}


def memory_max_batch(model: Model, *, prediction: StepOptions) -> int:
    """Predict the largest batch that fits, without a GPU."""
    from tresnet.memory import max_batch

    largest = max_batch(model, **prediction.arguments())
    say(str(largest))
    return 0 if largest.no_from > 1 else PARTLY_FAILED_EXIT_CODE


def memory_predict(
    model: Model,
    *,
    batch_size: Size = 64,
    snapshot: Path | None = None,
    json: bool = False,
    prediction: StepOptions,
) -> int:
    """Predict the peak memory of a step, without a GPU.

    Args:
        batch_size: Number of images in a micro-batch.
        snapshot: File for the memory over time, which PyTorch's viewer shows
            (pytorch.org/memory_viz).
        json: Print the prediction as JSON.
    """
    from tresnet.memory import predict
    from tresnet.memory.snapshot import write_snapshot

    predicted = predict(model, batch_size=batch_size, **prediction.arguments())
    if snapshot is not None:
        progress(f"snapshot: {write_snapshot(predicted, snapshot)}")
    say(dumps(predicted.to_dict()) if json else str(predicted))
    return 0


_FIVE_MINUTES = RunSettings(case_limit_s=300.0)


def memory_measure(
    models: Models,
    *,
    batch_size: BatchSizes = (64,),
    infer: bool = False,
    case: BenchCase,
    run: RunSettings = _FIVE_MINUTES,
) -> int:
    """Measure the memory of each case in a new process, in phases such as model and train.

    Args:
        infer: Measure inference instead of training.
    """
    from tresnet.measure.phases import measure_memory

    outcome = measure_memory(not infer, parse_cases(models, batch_size, case), run, progress)
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
