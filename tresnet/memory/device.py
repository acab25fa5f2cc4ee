"""Describe a GPU for memory predictions: capacity, cuBLAS's workspace and CUDA context."""

from dataclasses import dataclass, replace

import torch

from tresnet.env import MIB, parse_size
from tresnet.errors import InputError, unknown

GIB = 2**30
# Workspace that PyTorch allocates per cuBLAS handle: 32 MiB on Hopper, 8,519,680 B before Hopper.
_CUBLAS_WORKSPACE_BYTES = 8_519_680
_CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB


@dataclass(frozen=True)
class Device:
    """Description of a GPU for predictions; `capacity_bytes` is None for unlimited memory.

    `context_bytes` estimates a process's memory outside the caching allocator: CUDA context, loaded
    kernels, cuBLAS and cuDNN handles. `context_low_bytes` and `context_high_bytes` are its bounds.
    """

    name: str
    capacity_bytes: int | None = None
    cublas_workspace_bytes: int = _CUBLAS_WORKSPACE_BYTES
    context_low_bytes: int = 300 * MIB
    context_bytes: int = 600 * MIB
    context_high_bytes: int = 1500 * MIB


# Total capacities as in PyTorch's published messages of full memory, rounded down; none is measured
# here. An H200 of nominally 141 GB has 139.7 GiB.
_KNOWN = {
    "v100": Device("v100", int(31.7 * GIB)),
    "a100": Device("a100", int(79.1 * GIB)),
    "rtx3090": Device("rtx3090", int(23.5 * GIB)),
    "rtx4090": Device("rtx4090", int(23.5 * GIB)),
    "h100": Device("h100", int(79.1 * GIB), _CUBLAS_WORKSPACE_HOPPER_BYTES),
    "h200": Device("h200", int(139.7 * GIB), _CUBLAS_WORKSPACE_HOPPER_BYTES),
}
GENERIC = Device("generic")


def list_devices() -> list[str]:
    """Return the names that `find_device` accepts."""
    return sorted(_KNOWN)


def find_device(name: str | Device | None = None, gpu_memory: str | int | None = None) -> Device:
    """Return the GPU named `name`; `gpu_memory` (`80GiB` or bytes) overrides its capacity.

    If `name` is None, return this machine's GPU. If there is none, return a device of unlimited
    memory with an A100's cuBLAS workspace. An unknown name or a malformed size raises `InputError`.
    """
    if isinstance(name, Device):
        device = name
    elif name is None:
        device = present_device() if torch.cuda.is_available() else GENERIC
    elif isinstance(name, str) and name.lower() in _KNOWN:
        device = _KNOWN[name.lower()]
    else:
        raise InputError(
            f"{unknown('GPU', name, _KNOWN)} (or give only its memory, gpu_memory='80GiB')"
        )
    if gpu_memory is None:
        return device
    return replace(device, capacity_bytes=parse_size(gpu_memory))


def present_device(index: int = 0, *, free_only: bool = False) -> Device:
    """Describe a GPU of this machine; with `free_only`, its capacity excludes memory in use.

    With `free_only`, memory that this process's allocator reserved counts as free, but this
    process's CUDA context counts as used. A prediction subtracts a CUDA context once more.
    """
    properties = torch.cuda.get_device_properties(index)
    capacity_bytes = properties.total_memory
    if free_only:
        capacity_bytes = torch.cuda.mem_get_info(index)[0] + torch.cuda.memory_reserved(index)
    return describe_device(properties.name, capacity_bytes, (properties.major, properties.minor))


def describe_device(name: str, capacity_bytes: int, capability: tuple[int, int]) -> Device:
    """Return the `Device` of a GPU; the compute capability determines cuBLAS's workspace."""
    hopper = capability == (9, 0)
    workspace = _CUBLAS_WORKSPACE_HOPPER_BYTES if hopper else _CUBLAS_WORKSPACE_BYTES
    return Device(name, capacity_bytes, workspace)


def mib(n_bytes: float) -> str:
    """Return a size in bytes as text, such as `1234.5 MiB`."""
    return f"{n_bytes / MIB:.1f} MiB"
