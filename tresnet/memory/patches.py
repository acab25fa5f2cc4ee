"""Patches of PyTorch's code, so that predictions run on fake CUDA tensors without a GPU.

Each patch has a test in `tests/memory/test_patches.py`, which fails if the patch is not needed.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C import _autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.weak import WeakIdKeyDictionary

from tresnet.memory.attention import attend

Patch = AbstractContextManager[Any]
aten = torch.ops.aten

# Functions that replace operators whose kernel PyTorch chooses by the properties of the GPU.
GPU_KERNELS = {aten.scaled_dot_product_attention.default: attend}

_fake_results: dict[Any, Any] = {}  # of operators on fake tensors, as in `FakeTensorMode.cache`
_MOST_FAKE_RESULTS = 20_000  # a search for the largest batch of tresnet_xl needs about 7,000
_task_ids = itertools.count(1)
_MATERIALIZE = "_tresnet_materialize_grads"
_replaced = mock.patch.multiple  # context manager that replaces attributes of an object


@contextlib.contextmanager
def emulated_gpu() -> Iterator[None]:
    """Apply all patches except those of backward, so that fake CUDA tensors run as on a GPU."""
    with contextlib.ExitStack() as stack:
        for patch in (
            attention_on_gpu_kernels,
            autocast_without_gpu,
            bfloat16_convolutions_on_cudnn,
            attention_fastpath_off,
            foreach_optimizers,
            fake_modules_converted,
            fake_tensors_deepcopied,
            generators_on_cpu,
            properties_without_gpu,
            scaler_always_steps,
        ):
            stack.enter_context(patch())
        yield


@contextlib.contextmanager
def attention_on_gpu_kernels() -> Iterator[None]:
    """Run attention by `GPU_KERNELS`, the kernels that a GPU would run."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operator, kernel in GPU_KERNELS.items():
                for key in ("AutogradCUDA", "CUDA"):
                    library.impl(operator, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()  # removes the kernels from the dispatcher


@contextlib.contextmanager
def autocast_without_gpu() -> Iterator[None]:
    """Keep `torch.autocast("cuda")` and `torch.GradScaler("cuda")` enabled without a GPU."""
    with (
        _replaced(torch.cuda.amp.common, amp_definitely_not_available=lambda: False),
        _replaced(torch.cuda, is_bf16_supported=lambda including_emulation=True: True),
    ):
        yield


@contextlib.contextmanager
def bfloat16_convolutions_on_cudnn() -> Iterator[None]:
    """Make PyTorch choose cuDNN for bfloat16 convolutions, as it does on Ampere and newer GPUs.

    Without a GPU, PyTorch chooses another kernel, whose output is never channels last. The cache of
    FakeTensorMode holds results of the chosen kernel, so predictions have a cache of their own.
    They share it, because most operators of a model do not depend on the batch size.
    """
    real = torch._C._select_conv_backend

    def as_float16(value: Any) -> Any:
        fake = isinstance(value, FakeTensor) and value.device.type == "cuda"
        if not fake or value.dtype is not torch.bfloat16:
            return value
        options: Any = {"dtype": torch.float16, "device": value.device}
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), **options)

    def select(*args: Any, **kwargs: Any) -> Any:
        return real(*map(as_float16, args), **{k: as_float16(v) for k, v in kwargs.items()})

    if len(_fake_results) > _MOST_FAKE_RESULTS:
        _fake_results.clear()
    with (
        _replaced(torch._C, _select_conv_backend=select),
        _replaced(FakeTensorMode, cache=_fake_results),
    ):
        yield


def attention_fastpath_off() -> Patch:
    """Run `nn.MultiheadAttention` as separate operators instead of PyTorch's fused fast path."""
    return _replaced(torch.backends.mha, _is_fastpath_enabled=False)


@contextlib.contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Make optimizers and gradient clipping use foreach operators, PyTorch's default on a GPU."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def fake_modules_converted() -> Patch:
    """Make `module.to(...)` create new parameters, because PyTorch cannot swap fake parameters."""
    converted = WeakIdKeyDictionary()

    def apply(
        module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in converted:
                    with torch.no_grad():
                        new = fn(old)
                    if new is old:
                        continue
                    converted[old] = _like(old, new)
                tensors[name] = converted[old]
        return module

    return _replaced(nn.Module, _apply=apply)


def fake_tensors_deepcopied() -> Patch:
    """Make `copy.deepcopy` clone a fake tensor without copying its fake mode."""

    def deepcopied(fake: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(fake) not in memo:
            with torch.no_grad():
                memo[id(fake)] = _like(fake, fake.clone())
        return memo[id(fake)]

    return _replaced(FakeTensor, __deepcopy__=deepcopied)


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


class _CpuGenerator(torch.Generator):
    def __new__(cls, device: object = None) -> "_CpuGenerator":
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


def generators_on_cpu() -> Patch:
    """Make `torch.Generator("cuda")`, which timm's EMA calls, return a CPU generator."""
    return _replaced(torch, Generator=_CpuGenerator)


def properties_without_gpu() -> Patch:
    """Make `torch.cuda.get_device_properties`, which timm's optimizers call, describe an A100."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    a100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108, L2_cache_size=40 * 2**20)
    return _replaced(torch.cuda, get_device_properties=lambda device=None: a100)


def scaler_always_steps() -> Patch:
    """Make `GradScaler.step` always step the optimizer, because fake gradients cannot overflow."""
    return _replaced(
        torch.amp.GradScaler,
        _maybe_opt_step=lambda scaler, optimizer, state, *args, **kw: optimizer.step(*args, **kw),
    )


@contextlib.contextmanager
def backward_replaced(backward: Callable[..., None]) -> Iterator[None]:
    """Replace `torch.autograd.backward`, whose C++ engine rejects absent devices."""
    with _replaced(torch.autograd, backward=backward), materialize_grads_stored():
        yield


def materialize_grads_stored() -> Patch:
    """Store the argument of `ctx.set_materialize_grads` in `ctx`, where `wants_zeros` reads it."""
    real = FunctionCtx.set_materialize_grads

    def remember(ctx: Any, value: bool) -> None:
        real(ctx, value)
        setattr(ctx, _MATERIALIZE, value)

    return _replaced(FunctionCtx, set_materialize_grads=remember)


def wants_zeros(node: Any) -> bool:
    """Return whether a custom Function's backward receives zeros for missing gradients."""
    return getattr(node, _MATERIALIZE, True)


def saved_tensors_released(release: Callable[[], None]) -> Patch:
    """Make `ctx.maybe_clear_saved_tensors()` call `release` instead of its C++ code."""
    return _replaced(BackwardCFunction, maybe_clear_saved_tensors=lambda ctx: release())


def graph_task() -> Patch:
    """Set one graph task id for a whole backward, because checkpointing recomputes once per id."""
    task_id = next(_task_ids)
    return _replaced(torch._C, _current_graph_task_id=lambda: task_id)


def saved_tensor_hooks_replaced(
    wrap: Callable[[Any, Any], tuple[Any, Any]], popped: Callable[[], object]
) -> Patch:
    """Replace pushed saved-tensor hooks by `wrap(pack, unpack)`; call `popped` after each pop."""
    push = _autograd._push_saved_tensors_default_hooks
    pop = _autograd._pop_saved_tensors_default_hooks
    return _replaced(
        _autograd,
        _push_saved_tensors_default_hooks=lambda pack, unpack: push(*wrap(pack, unpack)),
        _pop_saved_tensors_default_hooks=lambda: (pop(), popped()),
    )
