"""`torch.compile` with the settings that suit these models, behind one function."""

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.layers.norm import ABN

# What the compiler's partitioner keeps for backward, in MB an image of tresnet_m at 224 in bf16: 28.8
# by default, 14.9 with this, which runs no convolution twice.
TRAINING_PARTITIONER: dict[str, Any] = {"aggressive_recomputation": True}


class CompiledModel:
    """A model as a compiled function; says how long its first call took, compilation included.

    Attributes:
        warmup_s: seconds of the first call, None before it.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        surroundings: Callable[[], AbstractContextManager[Any]],
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Keep the parts.

        Args:
            function: what `torch.compile` returned.
            surroundings: the context each call runs in.
            say: called with a line after the first call; by default this module's logger, level
                info.
        """
        self._function = function
        self._surroundings = surroundings
        self._say = logging.getLogger(__name__).info if say is None else say
        self.warmup_s: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Run the model on images (N, 3, H, W)."""
        began_s = time.perf_counter()
        with self._surroundings():
            y = self._function(x)
        if self.warmup_s is None:
            self.warmup_s = time.perf_counter() - began_s
            self._say(f"compiled in {self.warmup_s:.1f} s")
        return y


def compile_model(
    model: nn.Module,
    *,
    training: bool,
    cuda_graphs: bool = False,
    freeze: bool = False,
    dynamic: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> CompiledModel:
    """Compile a model for training or for inference.

    Training lets the partitioner recompute all but convolutions, matrix products and reductions in
    backward: what it recomputes is fused into passes that run anyway, and less is kept; unless
    `model.set_recompute("none")` leaves it at PyTorch's default. Plain
    operators are compiled unless `model.set_impl("triton")` asks for the fused kernels, which the
    compiler then calls as they are, and keeps their outputs.

    Args:
        model: a TResNet or any other model, perhaps wrapped for data-parallel training.
        training: forward and backward; else forward alone.
        cuda_graphs: replay the step as a CUDA graph: less work for the CPU, which pays where the GPU
            waits for it (small batches); static shapes, and memory of its own.
        freeze: compile the weights in as constants, so that they can be packed for the device; for
            weights that do not change, inference only.
        dynamic: whether sizes may vary without compiling again; None lets PyTorch find out.
        say: called with a line that tells how long compiling took; by default a logger.

    Returns:
        A function from images to logits.

    Raises:
        ValueError: `freeze` in training.
    """
    if training and freeze:
        raise ValueError("expected freeze=False in training: the weights change")
    mode = "reduce-overhead" if cuda_graphs else "default"
    if freeze:  # torch.compile takes a mode or options, not both
        options = {**torch._inductor.list_mode_options(mode), "freezing": True}
        function = torch.compile(model, options=options, dynamic=dynamic)
    else:
        function = torch.compile(model, mode=mode, dynamic=dynamic)
    # It would run the kernels' statistics, which look cheap to it, a second time in backward.
    kernels = any(isinstance(m, ABN) and m.impl == "triton" for m in model.modules())
    keeps = any(getattr(m, "recompute", None) == "none" for m in model.modules())
    settings = TRAINING_PARTITIONER if training and not (kernels or keeps) else {}
    return CompiledModel(function, partitioner(settings), say)


def partitioner(settings: dict[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a context in which the compiler's partitioner has `settings`.

    Args:
        settings: of `torch._functorch.config`; read while a graph is compiled, at its first call.
    """
    if not settings:
        return contextlib.nullcontext
    from torch._functorch import config

    return lambda: config.patch(settings)
