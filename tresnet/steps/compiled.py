"""`torch.compile` with the settings that suit these models, behind one function."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.settings import CompileMode

# What the compiler's partitioner keeps for backward, in MB an image of tresnet_m at 224 in bf16:
# 28.8 by default, 14.9 with this, which runs no convolution twice.
TRAINING_PARTITIONER: dict[str, Any] = {"aggressive_recomputation": True}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class CompiledModel:
    """Compiled function of a model, which logs `warmup_s`, the seconds of its first call.

    `partitioner` are settings of `torch._functorch.config`, read while a graph is compiled. A call
    with `cuda_graphs` clones its output, which the next one overwrites.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        partitioner: dict[str, Any],
        cuda_graphs: bool,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._function = function
        self._partitioner = partitioner
        self._cuda_graphs = cuda_graphs
        self._say = logging.getLogger(__name__).info if say is None else say
        self.warmup_s: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Run the model on (N, 3, H, W); `InputError` beyond PyTorch's limit of compilations."""
        began_s = time.perf_counter()
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self._surroundings(x):
            y = self._function(x)
        if self._cuda_graphs:
            y = y.clone()
        if self.warmup_s is None:
            self.warmup_s = time.perf_counter() - began_s
            self._say(f"compiled in {self.warmup_s:.1f} s")
        return y

    @contextlib.contextmanager
    def _surroundings(self, x: Tensor) -> Iterator[None]:
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._functorch import config as functorch

        try:
            with dynamo.patch(fail_on_recompile_limit_hit=True), functorch.patch(self._partitioner):
                yield
        except FailOnRecompileLimitHit as error:
            raise InputError(
                f"expected at most {dynamo.recompile_limit} shapes of images or settings of the "
                f"model, for each of which it is compiled, got one more: {list(x.shape)}, "
                f"{x.dtype}; use fewer, or raise torch._dynamo.config.recompile_limit"
            ) from error


def compile_model(
    model: nn.Module,
    mode: CompileMode = "default",
    *,
    training: bool,
    freeze: bool = False,
    recompute: str | None = None,
    dynamic: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> CompiledModel:
    """Compile a model for training or for inference; returns a function from images to logits.

    Where a model in training recomputes anything, the partitioner may recompute all but
    convolutions, matrix products and reductions in backward. Their recomputation is fused into
    passes that run anyway, and less is kept.

    Args:
        model: a TResNet or any other model, perhaps wrapped for data-parallel training.
        mode: of `torch.compile`, not "none"; "reduce-overhead" and "max-autotune" replay the model
            as CUDA graphs: less work for the CPU, static shapes, and memory of their own.
        training: forward and backward; else forward alone.
        freeze: compile the weights in as constants, packed for the device; else than in inference
            a ValueError.
        recompute: "none" leaves the partitioner at PyTorch's default; None takes the model's own
            setting, which other models than ours do not have: "none".
        dynamic: whether sizes may vary without compiling again; None lets PyTorch find out.
        say: called with the time of compilation in words; by default a logger.
    """
    if training and freeze:
        raise ValueError("expected freeze=False in training: the weights change")
    if freeze:  # torch.compile takes a mode or options, not both
        options = {**torch._inductor.list_mode_options(mode), "freezing": True}
        function = torch.compile(model, options=options, dynamic=dynamic)
    else:
        function = torch.compile(model, mode=mode, dynamic=dynamic)
    if recompute is None:
        bare = getattr(model, "module", model)  # inside DistributedDataParallel
        recompute = getattr(bare, "recompute", "none")
    recomputes = training and recompute != "none"
    return CompiledModel(
        function,
        partitioner=TRAINING_PARTITIONER if recomputes else {},
        cuda_graphs=mode in CUDA_GRAPH_MODES,
        say=say,
    )
