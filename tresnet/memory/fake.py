"""Copies of models that hold no data, and the surroundings in which they run."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types

from tresnet.errors import InputError
from tresnet.memory.attention import cuda_attention


def fake_device() -> torch.device:
    """The device predictions run on: a fake GPU, or the CPU where torch was built without CUDA."""
    return torch.device("cuda", 0) if torch.backends.cuda.is_built() else torch.device("cpu")


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, *, channels_last: bool
) -> nn.Module:
    """A copy of `model` whose parameters and buffers are fakes; the model itself stays untouched.

    No tensor data is copied. Tied parameters stay tied.

    Raises:
        InputError: lazy parameters without a shape, or a model that cannot be copied.
    """
    return _copy(
        model, lambda tensor: _fake_like(tensor, mode, device, channels_last=channels_last)
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device; the model itself stays untouched.

    Raises:
        InputError: as for `fake_copy`.
    """
    return _copy(model, _meta_like)


def _copy(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy in which `make` has replaced every parameter and buffer, tied ones once."""
    memo: dict[int, object] = {}
    for tensor in _tensors_of(model):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise InputError(
                f"expected a model whose parameters have shapes, got an uninitialised one in "
                f"{type(model).__name__}: run one batch through it first"
            )
        if id(tensor) not in memo:
            memo[id(tensor)] = make(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "pass a function that builds it, for example predict(lambda: MyModel(), ...)"
        ) from error


def in_order_of_to(model: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """Parameters and buffers in the order `model.to(device)` moves them; True for parameters."""
    for child in model.children():
        yield from in_order_of_to(child)
    yield from ((p, True) for p in model._parameters.values() if p is not None)
    yield from ((b, False) for b in model._buffers.values() if b is not None)


@contextlib.contextmanager
def fake_cuda(mode: FakeTensorMode) -> Iterator[None]:
    """Run fakes of CUDA tensors as a GPU would: attention, autocast, convolutions, optimizers."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(cuda_attention())
        stack.enter_context(_autocast_stays_on())
        stack.enter_context(_cudnn_takes_bfloat16())
        # The fast path of nn.MultiheadAttention is one operation whose inside cannot be seen.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        _foreach_supported_types.append(FakeTensor)
        stack.callback(_foreach_supported_types.remove, FakeTensor)
        yield


@contextlib.contextmanager
def _autocast_stays_on() -> Iterator[None]:
    """Let `torch.autocast("cuda")`, which models and checkpointing enter, work without a GPU."""
    answers: dict[str, tuple[Any, Callable[..., bool]]] = {
        "amp_definitely_not_available": (torch.cuda.amp.common, lambda: False),
        "is_bf16_supported": (torch.cuda, lambda including_emulation=True: True),
    }
    before = {name: getattr(module, name) for name, (module, _) in answers.items()}
    for name, (module, answer) in answers.items():
        setattr(module, name, answer)
    try:
        yield
    finally:
        for name, (module, _) in answers.items():
            setattr(module, name, before[name])


@contextlib.contextmanager
def _cudnn_takes_bfloat16() -> Iterator[None]:
    """Give bfloat16 convolutions to cuDNN, as GPUs since Ampere do, and so their layout.

    With no GPU to ask, PyTorch takes a kernel of its own, whose output is never channels last.
    """
    real = torch._C._select_conv_backend

    def select(*args: Any, **kwargs: Any) -> Any:
        return real(
            *map(_bfloat16_as_float16, args),
            **{name: _bfloat16_as_float16(value) for name, value in kwargs.items()},
        )

    torch._C._select_conv_backend = select  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._C._select_conv_backend = real


def _bfloat16_as_float16(value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.dtype is not torch.bfloat16:
        return value
    if value.device.type != "cuda":
        return value
    with value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=torch.float16, device=value.device
        )


@contextlib.contextmanager
def fake_autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """`torch.autocast`, which would turn itself off where there is no GPU; None for none."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def follow_modules(
    model: nn.Module, enter: Callable[[str], None], leave: Callable[[], None]
) -> None:
    """Call `enter(name)` and `leave()` around every submodule's forward, of a private copy.

    Our layers stay fused, as they are without hooks: what runs in one operation counts for the module
    that runs it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def before(_module: nn.Module, _args: object, name: str = name) -> None:
            enter(name)

        def after(_module: nn.Module, _args: object, _output: object) -> None:
            leave()

        before.bypassable = after.bypassable = True  # pyright: ignore[reportFunctionMemberAccess]
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (t for t in tensors.values() if t is not None)


def _fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, *, channels_last: bool
) -> torch.Tensor:
    """A fake of the same shape, strides and dtype on `device`, of its own storage."""
    shape, stride = tensor.shape, tensor.stride()
    if channels_last and tensor.dim() == 4:
        stride = _channels_last_stride(shape)
    meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, meta, device)
    if isinstance(tensor, nn.Parameter):
        # What nn.Parameter does, less a dispatched detach.
        fake._is_param = True  # type: ignore[attr-defined]
        fake.requires_grad_(tensor.requires_grad)
    return fake


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def _channels_last_stride(shape: torch.Size) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, channels * width, channels)
