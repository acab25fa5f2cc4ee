"""Helpers of the kernels' tests: their device, and uninitialised memory filled with NaN."""

import dataclasses
import numbers
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tresnet.ops import tiles
from tresnet.ops.epilogue import passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # interpreted on a CPU


def _prepare_the_interpreter() -> None:
    """Patch Triton's interpreter, which otherwise takes four times as long as the arrays' values.

    Triton patches its language at every call of a function that kernels share; here, once. Types
    of blocks are objects that it builds, and compares by shape, for each operation; here, each is
    built once, with the attributes of its tensors. Types of NumPy are looked up in a table that it
    builds for each operation. Checks that sums and products of integers fit 32 bits take half of
    the rest, and maps in tests are far smaller. Triton 3.6 cannot loop with NumPy 2.4.
    """
    from triton.runtime import interpreter

    patch_language, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    patched_modules: dict[int, Any] = {}
    get_dtype, dtypes = interpreter._get_np_dtype, dict[str, np.dtype]()

    def patched_language(function: Any) -> Any:
        module = function.__globals__
        if id(module) not in patched_modules:
            patch_language(function)
            patched_modules[id(module)] = module
        return types.SimpleNamespace(restore=lambda: None)

    def numpys(kind: Any) -> np.dtype:
        if kind.name not in dtypes:
            dtypes[kind.name] = get_dtype(kind)
        return dtypes[kind.name]

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patched_attribute(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = (
            interpreter.interpreter_semantic,
            getattr(member, "__wrapped__", member),
        )

        def run(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, _semantic=semantic, **kwargs)

        scope.set_attr(place, name, run)

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    execute = interpreter.GridExecutor.__call__

    def executed(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # which would see its copies of tensors
            execute(*args, **kwargs)

    interpreter.GridExecutor.__call__ = executed
    interpreter._get_np_dtype = numpys
    interpreter._patch_attr = patched_attribute
    interpreter._patch_lang = patched_language
    interpreter._patch_lang_tensor = patched_tensor
    _build_types_once(interpreter)


def _build_types_once(interpreter: Any) -> None:
    core, handle_of = interpreter.tl.core, interpreter.TensorHandle
    semantic = type(interpreter.interpreter_semantic)
    make, broadcast = core.tensor.__init__, semantic.broadcast_impl_value
    convert = semantic.binary_op_type_checking_impl
    built: dict[tuple[Any, ...], Any] = {}
    wider: dict[tuple[int, int], tuple[Any, ...]] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def build_once(cls: Any, key: Callable[..., tuple[Any, ...]]) -> None:
        build = cls.__init__

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            name = cls, *key(*args, **kwargs)
            if name not in built:
                build(one := object.__new__(cls), *args, **kwargs)
                built[name] = one
            return built[name]

        cls.__new__, cls.__init__ = new, lambda *_, **__: None

    def initialise(self: Any, handle: Any, kind: Any) -> None:
        if "_of_tensors" not in vars(kind):
            make(self, handle, kind)
            kind._of_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        vars(self).update(kind._of_tensors, handle=handle)

    def widen(one: Any, kind: Any) -> Any:
        if one.type is kind:
            return one
        values = np.broadcast_to(one.handle.data, tuple(kind.shape))
        return core.tensor(handle_of(values, one.dtype), kind)

    def broadcast_both(self: Any, *both: Any) -> tuple[Any, ...]:
        a, b = both[0].type, both[1].type
        if a is b:
            return both
        kinds = wider.get((id(a), id(b)))
        if kinds is None:
            made = broadcast(self, *both)
            wider[id(a), id(b)] = made[0].type, made[1].type, a, b  # which keeps the ids of a and b
            return made
        return widen(both[0], kinds[0]), widen(both[1], kinds[1])

    def convert_both(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> Any:
        kind = getattr(left, "type", None)
        if kind is getattr(right, "type", 0) and not (kind.scalar.is_ptr() or flags[2:] or named):
            return left, right
        if kind is None or not isinstance(right, numbers.Number):
            return convert(self, left, right, *flags, **named)
        key = repr(right), id(kind), *flags, *named.items()
        if key not in constants:
            made, constants[key] = convert(self, left, right, *flags, **named)
            if made is not left:  # a type that both are converted to
                return made, constants.pop(key)
        return left, constants[key]

    def pointer(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return *map(str, args), *map(str, kwargs.items())

    def block(element_ty: Any, shape: Any) -> tuple[Any, ...]:
        return id(element_ty), *(getattr(size, "value", size) for size in shape)

    equals = core.dtype.__eq__
    core.dtype.__eq__ = lambda one, other: one is other or equals(one, other)
    build_once(core.pointer_type, pointer)
    build_once(core.block_type, block)
    core.tensor.__init__, semantic.broadcast_impl_value = initialise, broadcast_both
    semantic.binary_op_type_checking_impl = convert_both


if DEVICE == "cpu" and tiles.interpreted():
    _prepare_the_interpreter()
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: a value that a kernel forgets to write shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        with warnings.catch_warnings():
            # the plain operators' padding has no deterministic gradient on a GPU, nor may cuBLAS
            # have deterministic products, if CUDA began before its variable was set
            no_way = ".*(deterministic implementation|not deterministic because it uses CuBLAS).*"
            warnings.filterwarnings("ignore", message=no_way)
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs with large tiles: the interpreter's time goes by the number of operations."""
    if DEVICE == "cpu":
        monkeypatch.setattr(tiles, "_specs", {})
        for name in ("TILE", "BLUR_TILE"):
            monkeypatch.setattr(tiles, name, 1 << 16)
        monkeypatch.setattr(passes, "MERGE_CHANNELS", 64)
