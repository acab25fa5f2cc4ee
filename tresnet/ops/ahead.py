"""Kernels compiled before they are launched, several at a time, into Triton's own cache."""

import importlib
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tresnet.errors import InputError
from tresnet.ops.operators import Launch
from tresnet.ops.tiles import interpreted


class Specialisation(NamedTuple):
    """A kernel that Triton tells from others: where its function is, and Triton's own words."""

    module: str
    name: str
    data: str


class _Pointer:
    """In place of a tensor on the GPU: what Triton asks of one."""

    def __init__(self, x: torch.Tensor) -> None:
        # PyTorch's allocator gives multiples of 512 bytes
        self.dtype, self._offset = x.dtype, int(x.storage_offset()) * x.element_size()

    def data_ptr(self) -> int:
        return self._offset


class _Compiler:
    """In place of Triton's driver, which wants a GPU: says what is compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return hash(str(self._target))  # no GPU's number: nothing is kept for one that is there

    def get_current_stream(self, device: int) -> int:
        return 0


def find_target(name: str | None) -> GPUTarget:
    """What Triton compiles for on this machine's GPU, or on one such as `sm_90`.

    Raises:
        InputError: another name, no GPU and no name, or Triton interprets its kernels.
    """
    if interpreted():
        raise InputError(
            "expected Triton to compile, got TRITON_INTERPRET=1, with which it interprets: unset it"
        )
    if name is not None:
        found = re.fullmatch(r"sm_(\d{2,3})", name)
        if found is None or int(found[1]) < 80:
            raise InputError(f"expected a target of sm_80 or later, such as sm_90, got {name!r}")
        return GPUTarget("cuda", int(found[1]), 32)
    if not torch.cuda.is_available():
        raise InputError("expected a GPU to compile for, got none: name one, such as sm_90")
    return driver.active.get_current_target()  # pyright: ignore[reportReturnType]


def specialisations(launches: Sequence[Launch], target: GPUTarget) -> list[Specialisation]:
    """What Triton would compile for these launches; it is asked itself, and compiles nothing."""
    found: dict[Specialisation, None] = {}

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        found[Specialisation(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # it is dealt with

    before: Any = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    active = driver._active
    driver.set_active(_Compiler(target))  # pyright: ignore[reportArgumentType]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Triton's defaults: the first launch says it again
            for kernel, tensors, numbers, warps in launches:
                kernel.warmup(*map(_Pointer, tensors), *numbers, grid=(1, 1, 1), num_warps=warps)
    finally:
        knobs.runtime.jit_cache_hook = before
        driver._active = active
    return list(found)


def compile_all(
    wanted: Sequence[Specialisation], target: GPUTarget, processes: int | None = None
) -> None:
    """Compile them in as many processes; what is in Triton's cache already takes no time.

    Raises:
        Exception: whatever the compiler says.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), max(len(wanted), 1))
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_prepare, initargs=(target,)
    ) as pool:
        list(pool.map(_compile, wanted))


def _prepare(target: GPUTarget) -> None:
    warnings.simplefilter("ignore")
    driver.set_active(_Compiler(target))  # pyright: ignore[reportArgumentType]


def _compile(wanted: Specialisation) -> None:
    getattr(importlib.import_module(wanted.module), wanted.name).preload(wanted.data)
