"""`tresnet memory workspaces`: measure what cuDNN borrows, for predictions to count it."""

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from tresnet.cli.memory_matrix import matrix_cases
from tresnet.cli.memory_options import PARTLY_FAILED_EXIT_CODE, StepOptions
from tresnet.cli.output import fail, progress, say
from tresnet.errors import InputError

if TYPE_CHECKING:
    from tresnet.memory.convolutions import Convolution


@dataclasses.dataclass(frozen=True)
class MemoryWorkspaces:
    """Measure the memory that cuDNN borrows for each convolution of a training step; needs a GPU.

    `--workspaces FILE` of `predict`, `max-batch` and `compare` then counts it.
    """

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """Ours (tresnet_m), timm:NAME or torchvision:NAME."""

    output: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE")] = None
    """The table to write, JSON. It must not exist."""

    batch_size: tuple[int, ...] = (64,)
    """Images a step; several are measured one after another."""

    input_size: tuple[int, ...] = ()
    """Side of the square, or height and width, or channels and all sides; by default the model's."""

    amp: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32",)
    """Autocast dtypes; fp32 is none."""

    channels_last: bool = False
    """Store images and weights channels last."""

    norm: Literal["abn", "batchnorm", "inplace_abn"] | None = None
    """Norm of our models; others have their own."""

    matrix: bool = False
    """All steps of `compare --matrix`, or those of the models named."""

    cudnn_benchmark: bool = False
    """Let cuDNN try all its kernels, as train.py does; what the search borrows counts."""

    device: str = "cuda"
    """Such as cuda or cuda:1."""

    time_limit_s: float = 540
    """Seconds after which no further convolution is begun; what was measured is written."""

    def run(self, argv: list[str]) -> int:
        """Measure and write the table."""
        from tresnet.measure.records import check_directory, write_new
        from tresnet.memory.convolutions import cuda_meter, measure_all, summarise

        began = time.monotonic()
        path = self._new_file()
        meter = cuda_meter(self._device(), benchmark=self.cudnn_benchmark)
        check_directory(path.parent)
        found = self._convolutions()
        progress(f"measuring {len(found)} convolutions")
        table, unmeasured = measure_all(
            found.values(), meter, lambda: time.monotonic() - began < self.time_limit_s
        )
        write_new(path, json.dumps(self._content(table, unmeasured, argv), indent=1) + "\n")
        say(summarise(table))
        progress(f"table: {path}")
        if unmeasured:
            key, reason = next(iter(unmeasured.items()))
            fail(f"{len(unmeasured)} convolutions not measured, such as {key}: {reason}")
        return PARTLY_FAILED_EXIT_CODE if unmeasured else 0

    def _new_file(self) -> Path:
        if self.output is None:
            raise InputError("expected a file to write the table to: -o FILE.json")
        if self.output.exists():
            raise InputError(f"expected a new file to write, but {self.output} exists: remove it")
        return self.output

    def _device(self) -> Any:
        import torch

        try:
            return torch.device(self.device)
        except RuntimeError as error:
            raise InputError(f"expected a device such as cuda:0, got {self.device!r}") from error

    def _steps(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Each model with its options and its training step; inference has no other convolutions."""
        if self.matrix:
            training = [c for c in matrix_cases(self.models) if c.step["train"]]
            # the optimizer does not matter to convolutions
            distinct = {(c.name, c.step["amp"]): c for c in training}
            return [(c.name, c.model_options, c.step) for c in distinct.values()]
        if not self.models:
            raise InputError("expected models whose convolutions to measure, or --matrix; got none")
        return [
            (name, options.model_options(name), {**options.step(), "batch_size": batch_size})
            for name in self.models
            for batch_size in self.batch_size
            for options in (
                StepOptions(
                    self.input_size, amp=amp, channels_last=self.channels_last, norm=self.norm
                )
                for amp in self.amp
            )
        ]

    def _convolutions(self) -> "dict[str, Convolution]":
        from tresnet.memory.convolutions import collect
        from tresnet.memory.models import find_model
        from tresnet.memory.plan import make_plan

        found: dict[str, Convolution] = {}
        for name, model_options, step in self._steps():
            model = find_model(name, model_options)[1]
            found |= collect(model, make_plan(model, **step))
        return found

    def _content(
        self, table: dict[str, int], unmeasured: dict[str, str], argv: list[str]
    ) -> dict[str, Any]:
        from tresnet import env
        from tresnet.measure.records import public_command

        return {
            "what": "workspaces",
            "command": public_command(["tresnet", *argv]),
            "environment": env.describe(self._device()),
            "settings": {"cudnn_benchmark": self.cudnn_benchmark},
            "unmeasured": unmeasured,
            "workspaces": table,
        }
