"""What the commands that compare whole models ask for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from tresnet.measure.cases import BenchCase


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Models, the settings they share, and where they run."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")]
    """Ours (tresnet_m), timm:NAME or torchvision:NAME. A model may have its own settings:
    tresnet_m@norm=inplace_abn,dtype=fp16, tresnet_m@impl=triton or
    timm:resnet50@compile=default,channels_last=true."""

    input_size: int | None = None
    """Side of the square image in pixels; by default each model's own."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """By default bf16 on a GPU and fp32 on a CPU. fp16 training uses a gradient scaler."""

    channels_last: bool = False
    """Store images and weights channels last."""

    compile: Literal[
        "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "none"
    """Mode of torch.compile; none is eager."""

    input: Literal["float", "uint8"] = "float"
    """What a step is fed: floats in [0, 1], or bytes. Our channels-last stem reads bytes as they are;
    others divide by 255 within the step."""

    norm: Literal["abn", "batchnorm", "inplace_abn"] = "abn"
    """Norm of our models; others have their own."""

    device: str | None = None
    """Such as cuda, cuda:1 or cpu; by default a GPU if there is one."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written; an existing record is never overwritten."""

    def resolved_device(self) -> str:
        """What was asked for, else a GPU, else the CPU."""
        from tresnet.env import device_or_default

        return device_or_default(self.device)

    def cases(self, batch_sizes: Sequence[int], cast: str | None = None) -> "list[BenchCase]":
        """Every model at every batch size."""
        from tresnet.measure.cases import BenchCase, parse_cases

        on_gpu = self.resolved_device().startswith("cuda")
        defaults = BenchCase(
            model="",
            input_size=self.input_size,
            dtype=self.dtype or ("bf16" if on_gpu else "fp32"),
            cast=cast,
            channels_last=self.channels_last,
            compile=self.compile,
            norm=self.norm,
            input=self.input,
        )
        return parse_cases(self.models, defaults, batch_sizes)
