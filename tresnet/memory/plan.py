"""What one step is: everything a prediction or a measurement must agree on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.errors import InputError
from tresnet.memory.models import find_input_size
from tresnet.memory.optimizers import OptimizerFactory, find_optimizer
from tresnet.memory.sizes import MIB

Loss = Callable[[Any, torch.Tensor], torch.Tensor]

_AMP_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_NO_AMP = {None, "none", "fp32", "float32"}


@dataclass(frozen=True)
class Plan:
    """One training step or one inference.

    `input_size` and `target_size` lack the batch; `target_size` None stands for one class index
    an image. `input_dtype` is float32, or uint8 for a model that takes bytes. `checkpointing` names
    the submodules whose activations are recomputed, or is True for the model's own
    `set_grad_checkpointing`.
    """

    batch_size: int
    input_size: tuple[int, ...]
    train: bool
    amp: torch.dtype | None
    optimizer_name: str
    optimizer: OptimizerFactory
    loss: Loss
    input_dtype: torch.dtype = torch.float32
    target_size: tuple[int, ...] | None = None
    channels_last: bool = False
    accumulation_steps: int = 1
    checkpointing: bool | tuple[str, ...] = False
    ema: bool = False
    ddp: bool = False
    ddp_bucket_bytes: int = 25 * MIB
    ddp_bucket_view: bool = False
    zero_grad_to_none: bool = True

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Batch first: (N, C, H, W) for images."""
        return self.batch_size, *self.input_size

    def describe(self) -> str:
        """`train, batch 128 of 3x224x224, fp32, sgd`."""
        precision = "fp32" if self.amp is None else f"{str(self.amp).split('.')[1]} autocast"
        size = "x".join(map(str, self.input_size))
        parts = ["train" if self.train else "inference", f"batch {self.batch_size} of {size}"]
        if self.input_dtype is torch.uint8:
            parts.append("uint8 input")
        parts.append(precision)
        if self.train:
            parts.append(self.optimizer_name)
        if self.channels_last:
            parts.append("channels_last")
        if self.train and self.accumulation_steps > 1:
            parts.append(f"accumulation over {self.accumulation_steps}")
        switches = {"checkpointing": self.checkpointing, "ema": self.ema, "ddp": self.ddp}
        parts += [name for name, on in switches.items() if on and self.train]
        return ", ".join(parts)


def make_plan(
    model: nn.Module,
    *,
    batch_size: int,
    input_size: int | tuple[int, ...] | None = None,
    input_dtype: str | torch.dtype = torch.float32,
    amp: str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] | OptimizerFactory = "sgd",
    optimizer_options: Mapping[str, object] | None = None,
    train: bool = True,
    loss: Loss | None = None,
    target_size: tuple[int, ...] | None = None,
    channels_last: bool = False,
    accumulation_steps: int = 1,
    checkpointing: bool | Sequence[str] = False,
    ema: bool = False,
    ddp: bool = False,
    ddp_bucket_mib: float = 25,
    ddp_bucket_view: bool = False,
    zero_grad_to_none: bool = True,
) -> Plan:
    """Check the arguments of `predict` and gather them.

    Raises:
        InputError: which argument, what was expected and what came.
    """
    name, factory = find_optimizer(optimizer, optimizer_options)
    _positive("batch_size", batch_size)
    _positive("accumulation_steps", accumulation_steps)
    if not ddp_bucket_mib > 0:
        raise InputError(f"expected ddp_bucket_mib above zero, got {ddp_bucket_mib!r}")
    return Plan(
        batch_size=batch_size,
        input_size=find_input_size(model, input_size),
        input_dtype=_input_dtype(input_dtype),
        train=train,
        amp=_amp_dtype(amp),
        optimizer_name=name,
        optimizer=factory,
        loss=loss or default_loss,
        target_size=target_size,
        channels_last=channels_last,
        accumulation_steps=accumulation_steps,
        checkpointing=checkpointing if isinstance(checkpointing, bool) else tuple(checkpointing),
        ema=ema,
        ddp=ddp,
        ddp_bucket_bytes=int(ddp_bucket_mib * MIB),
        ddp_bucket_view=ddp_bucket_view,
        zero_grad_to_none=zero_grad_to_none,
    )


def default_loss(output: object, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy where an output has the form of logits for the target, else its mean.

    Summed over all floating-point tensors of the output, auxiliary heads included.
    """
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    losses = [_one_loss(t, target) for t in tensors if t.is_floating_point()]
    if not losses:
        raise InputError("expected a model that returns floating-point tensors, got none")
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])


def _one_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    class_indices = target.dim() == 1 and output.dim() == 2
    if class_indices or output.shape == target.shape:
        return F.cross_entropy(output, target)
    return output.float().mean()


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"expected {name} to be a whole number from 1 on, got {value!r}")


def _input_dtype(dtype: str | torch.dtype) -> torch.dtype:
    for known in (torch.float32, torch.uint8):
        if dtype in (known, str(known).removeprefix("torch.")):
            return known
    raise InputError(f"expected input_dtype 'float32' or 'uint8', got {dtype!r}")


def _amp_dtype(amp: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(amp, torch.dtype) and amp in (torch.float16, torch.bfloat16):
        return amp
    if isinstance(amp, str) and amp.lower() in _AMP_DTYPES:
        return _AMP_DTYPES[amp.lower()]
    if amp in _NO_AMP or amp is torch.float32:
        return None
    raise InputError(f"expected amp to be None, 'bf16' or 'fp16', got {amp!r}")
