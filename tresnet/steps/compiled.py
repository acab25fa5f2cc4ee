"""`compile_model`: `torch.compile` with settings that suit the models of this package."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import ConfigError, InputError
from tresnet.settings import CompileMode

# With this setting the compiler keeps 14.9 MB per image for backward instead of 28.8 MB
# (tresnet_m, 224 pixels, bf16), and runs no convolution twice.
_TRAINING_PARTITIONER: dict[str, Any] = {"aggressive_recomputation": True}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # with CUDA graphs of torch.compile
Say = Callable[[str], object]
log: Say = logging.getLogger("tresnet.steps").info


def check_compiled_accumulation(mode: CompileMode, accumulate: int) -> None:
    """Raise `ConfigError` for gradient accumulation with CUDA graphs of `torch.compile`.

    The gradients of a micro-batch lie in a CUDA graph's memory, and the next replay overwrites this
    memory. PyTorch then raises an error or returns wrong sums (pytorch issues 169545 and 96693).
    """
    if accumulate > 1 and mode in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--accumulate: PyTorch loses gradients between micro-batches with --compile {mode}:"
            " choose --compile default, with --cuda-graph or without"
        )


@dataclass
class CompiledModel:
    """Compiled model, called like a function."""

    function: Callable[[Tensor], Tensor]
    partitioner: dict[str, Any]  # settings of `torch._functorch.config` during compilation
    cuda_graphs: bool  # whether calls replay CUDA graphs, which overwrite their last output
    say: Say  # called with a message that has the duration of the first call
    was_called: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Run the model on images (N, 3, H, W); raise `InputError` after too many compilations."""
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._functorch import config as functorch

        began_s = time.perf_counter()
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            with dynamo.patch(fail_on_recompile_limit_hit=True), functorch.patch(self.partitioner):
                y = self.function(x)
        except FailOnRecompileLimitHit as error:
            raise InputError(
                f"expected at most {dynamo.recompile_limit} shapes of images and settings of the "
                f"model, because each needs a compilation, got one more: {list(x.shape)}, "
                f"{x.dtype}; use fewer, or raise torch._dynamo.config.recompile_limit"
            ) from error
        if not self.was_called:
            self.say(f"compiled in {time.perf_counter() - began_s:.1f} s")
        self.was_called = True
        return y.clone() if self.cuda_graphs else y


def compile_model(
    model: nn.Module,
    mode: CompileMode = "default",
    *,
    training: bool,
    freeze: bool = False,
    recompute: str | None = None,
    say: Say = log,
) -> CompiledModel:
    """Compile a model for training or for inference; return a function from images to logits.

    `mode` is a mode of `torch.compile`. "reduce-overhead" and "max-autotune" replay CUDA graphs,
    which saves CPU time, but needs static shapes and more memory. `freeze` makes Inductor compile
    the weights as constants; with `training`, it raises ValueError. `say` is called with a message
    that states the duration of the first call, which compiles the model.

    In training, `recompute` "activations" makes backward recompute all operations but convolutions,
    matrix products and reductions. This saves memory, and Inductor fuses the recomputed operations
    into kernels that run anyway. "none" keeps PyTorch's default partitioner. With None, `recompute`
    of the model's `fused.Runner` applies, or "none" for a model without a runner.
    """
    if training and freeze:
        raise ValueError("expected freeze=False in training: the weights change")
    if freeze:  # torch.compile takes a mode or options, not both
        options = {**torch._inductor.list_mode_options(mode), "freezing": True}
        function = torch.compile(model, options=options)
    else:
        function = torch.compile(model, mode=mode)
    if recompute is None:
        bare = getattr(model, "module", model)  # unwraps DistributedDataParallel
        recompute = getattr(getattr(bare, "runner", None), "recompute", "none")
    recomputes = training and recompute != "none"
    return CompiledModel(
        function, _TRAINING_PARTITIONER if recomputes else {}, mode in CUDA_GRAPH_MODES, say
    )
