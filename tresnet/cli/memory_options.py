"""What the `tresnet memory` commands have in common: the step, the GPU, the cases to measure."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from tresnet.cli.memory_case import MemoryCase, measure_in_new_process
from tresnet.cli.output import fail, progress
from tresnet.errors import InputError

if TYPE_CHECKING:
    from tresnet.memory.workspaces import Workspaces

PARTLY_FAILED_EXIT_CODE = 1
RECORDS = Path("benchmarks/records")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What one step is."""

    input_size: tuple[int, ...] = ()
    """Side of the square, or height and width, or channels and all sides; by default the model's."""

    input: Literal["float", "uint8"] = "float"
    """What the model is fed: fp32, or bytes, as train.py feeds a channels-last model without mixup."""

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
            "input_dtype": "uint8" if self.input == "uint8" else "float32",
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
            "workspaces": load_table(self.workspaces),
        }


@dataclasses.dataclass(frozen=True)
class Measured(StepOptions):
    """Cases measured in fresh processes, and their record."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """The study's subjects (tensor, cnn, vgg16, resnet50, vit_b_16, unetr), ours, timm:NAME or
    torchvision:NAME; all six subjects by default."""

    batch_size: int = 64
    """Images a step; subjects have their own."""

    device: str = "cuda"
    """Such as cuda or cpu."""

    timeout_s: float = 300
    """Seconds a case may take."""

    output_dir: Path = RECORDS
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

    def check(self) -> None:
        """Find out before the work whether it can be done and written down.

        Raises:
            InputError: no such device, or a directory that cannot be written to.
        """
        from tresnet.measure.records import check_directory

        self.measured_on()
        check_directory(self.output_dir)

    def measured_on(self) -> str | None:
        """The device of the record.

        Raises:
            InputError: there is none such.
        """
        require_gpu(self.device)
        return self.device

    def measured(self, case: MemoryCase, step: str = "") -> dict[str, Any]:
        """The case's phases from a fresh process; a failure is reported and kept."""
        progress(f"measuring {case.name} {step}".rstrip())
        result = measure_in_new_process(case, self.timeout_s)
        if "error" in result:
            fail(f"{case.name}: {result['error']}")
        return result

    def write(
        self,
        what: str,
        rows: list[dict[str, Any]],
        argv: list[str],
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Write the record; its settings are by default those of the step."""
        from tresnet.measure.records import write_record

        path = write_record(
            self.output_dir,
            what,
            device=self.measured_on(),
            settings=settings or {**self.step(), "batch_size": self.batch_size},
            rows=rows,
            warmup_steps=0,
            runs=1,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")


def load_table(path: Path | None) -> "Workspaces | None":
    """A table of workspaces; None for none."""
    from tresnet.memory import Workspaces

    return None if path is None else Workspaces.load(path)


def require_gpu(device: str) -> None:
    """Raise `InputError` if the device is none of this machine, or neither CPU nor CUDA GPU."""
    import torch

    from tresnet.env import timed_device

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(
            f"expected a GPU for --device {device}, found none: measure on a machine with one, or "
            "check that the command runs with --device cpu"
        )
    timed_device(device)


def cell(value: float | None) -> str:
    """A number with one digit behind the point; `-` for none."""
    return "-" if value is None else f"{value:.1f}"
