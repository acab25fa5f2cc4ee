"""What a step is made of: frozen dataclasses, options of each command that runs it.

The text under a field is its help on the command line, and its type says which numbers it takes.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch

Amp = Literal["off", "bf16", "fp16"]
CompileMode = Literal[
    "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Dtype = Literal["fp32", "bf16", "fp16"]

COMPILE_MODES: tuple[str, ...] = get_args(CompileMode)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AMP_DTYPES: dict[str, torch.dtype | None] = {
    "off": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Range(NamedTuple):
    """What an option that is a number is checked for before anything runs."""

    expected: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Range("at least 1", lambda value: value >= 1)]
CountOrZero = Annotated[int, Range("0 or more", lambda value: value >= 0)]
Positive = Annotated[float, Range("more than 0", lambda value: value > 0)]
PositiveOrZero = Annotated[float, Range("0 or more", lambda value: value >= 0)]
Share = Annotated[float, Range("0 to 1", lambda value: 0 <= value <= 1)]
ShareAbove0 = Annotated[float, Range("more than 0 and at most 1", lambda value: 0 < value <= 1)]
ShareBelow1 = Annotated[float, Range("0 or more and below 1", lambda value: 0 <= value < 1)]


@dataclasses.dataclass(frozen=True)
class Compute:
    """In which precision and layout a step computes, and whether it is compiled."""

    amp: Amp = "off"
    """Autocast to 16 bits; fp16 scales the loss in training."""
    channels_last: bool = False
    """Keep images and weights in channels-last memory."""
    compile: CompileMode = "none"
    """Mode of torch.compile. none: run eagerly."""

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """The type of autocast, None for none."""
        return AMP_DTYPES[self.amp]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast to that type, or nothing for none."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        # Each weight is cast once a pass anyway, and copies kept beyond a captured pass would be
        # stale.
        return torch.autocast(device.type, dtype=self.amp_dtype, cache_enabled=False)

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclasses.dataclass(frozen=True)
class TrainingCompute(Compute):
    """The same for a model that is trained."""

    cuda_graph: bool = False
    """Replay forward and backward as a CUDA graph: less work for the CPU, where the GPU waits for
    it. Batches of another size run eagerly."""


@dataclasses.dataclass(frozen=True)
class InferenceCompute(Compute):
    """The same for a model whose weights do not change any more."""

    dtype: Dtype = "fp32"
    """Type of the weights."""
    fold: bool = True
    """Fold each batch norm into the convolution before it: the same outputs up to rounding."""
    freeze: bool = False
    """With --compile: compile the weights in as constants."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How the weights are updated."""

    opt: str = "sgd"
    """Optimizer by timm's name; sgd is SGD with Nesterov momentum."""
    lr: Positive = 0.1
    """Highest learning rate."""
    lr_batch: Count | None = None
    """Images per update that `lr` is meant for; it scales linearly. None: `lr` as it is."""
    momentum: ShareBelow1 = 0.9
    """Momentum, where the optimizer has one."""
    weight_decay: PositiveOrZero = 1e-4
    """Weight decay of convolution and linear weights; biases and norms have none."""
    layer_decay: ShareAbove0 = 1.0
    """Learning rate of each block as a share of the next one's; the head has the whole. 1: all have
    the same."""
    clip_grad: Positive | None = None
    """Largest norm of the gradients. None: no limit."""
    accumulate: Count = 1
    """Forward passes per update."""


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """How long, and the learning rate over time."""

    epochs: Count = 300
    """Passes over the training images."""
    lr_schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    """Shape after the warm-up; one-cycle warms up along a cosine, the others along a line."""
    warmup_fraction: Share = 0.2
    """Share of all updates in which the learning rate rises."""
    start_factor: ShareAbove0 = 0.04
    """First learning rate, as a share of the highest."""
    end_factor: ShareAbove0 = 4e-6
    """Last learning rate, as a share of the highest."""


@dataclasses.dataclass(frozen=True)
class EmaConfig:
    """The moving average of the weights: what is evaluated and kept as best."""

    ema_decay: ShareBelow1 = 0.0
    """Share of the average kept at each update. 0: no average."""
    ema_warmup: bool = True
    """Let the decay grow from 0, so that a short run's average forgets the start."""
