"""Descriptions of GPUs for memory predictions: capacity, cuBLAS workspace and CUDA context."""

from dataclasses import dataclass, replace

import torch

from tresnet.devices import MIB
from tresnet.errors import InputError, unknown
from tresnet.settings import BF16_CAPABILITY, Capability
from tresnet.settings.fields import parse_size

GIB = 2**30
# Workspace that PyTorch allocates per cuBLAS handle: 32 MiB on Hopper, 8,519,680 B before Hopper.
_CUBLAS_WORKSPACE_BYTES = 8_519_680
_CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
# Growth of the CUDA context by kernels and handles after its creation. On an H200, training of
# tresnet_m took 324 MiB: from 1142 to 1466 MiB of the device's used less the reserved memory
# (benchmarks/records/train_jpeg_folder_h200.csv). The upper bound is twice as much.
_CONTEXT_GROWTH = {
    "context_low_bytes": 0,
    "context_bytes": 324 * MIB,
    "context_high_bytes": 648 * MIB,
}


@dataclass(frozen=True)
class Device:
    """Description of a GPU for predictions; `capacity_bytes` is None for unlimited memory.

    `context_bytes` estimates a process's memory outside the caching allocator, for CUDA context,
    kernels and handles, with the bounds `context_low_bytes` and `context_high_bytes`.
    """

    name: str
    capacity_bytes: int | None = None
    cublas_workspace_bytes: int = _CUBLAS_WORKSPACE_BYTES
    context_low_bytes: int = 300 * MIB
    context_bytes: int = 600 * MIB
    context_high_bytes: int = 1500 * MIB
    capability: Capability = BF16_CAPABILITY

    def __str__(self) -> str:
        memory = "unlimited memory" if self.capacity_bytes is None else mib(self.capacity_bytes)
        capability = ".".join(map(str, self.capability))
        return f"{self.name}, compute capability {capability}, {memory}"


def describe_device(name: str, capacity_bytes: int, capability: Capability) -> Device:
    """Return the `Device` of a GPU; the compute capability determines cuBLAS's workspace."""
    hopper = capability == (9, 0)
    workspace = _CUBLAS_WORKSPACE_HOPPER_BYTES if hopper else _CUBLAS_WORKSPACE_BYTES
    return Device(name, capacity_bytes, workspace, capability=capability)


# Total capacities, rounded down, from PyTorch's out-of-memory messages that users have published;
# none is measured here. An H200 of nominally 141 GB has 139.7 GiB.
_GPUS = {
    name: describe_device(name, int(capacity_gib * GIB), capability)
    for name, capacity_gib, capability in (
        ("v100", 31.7, (7, 0)),
        ("a100", 79.1, (8, 0)),
        ("rtx3090", 23.5, (8, 6)),
        ("rtx4090", 23.5, (8, 9)),
        ("h100", 79.1, (9, 0)),
        ("h200", 139.7, (9, 0)),
    )
}
# GPU that predictions assume if no GPU is named and the machine has none.
GENERIC = Device("an assumed GPU")


def list_devices() -> list[str]:
    """Return the names that `find_device` accepts."""
    return sorted(_GPUS)


def find_device(name: str | Device | None = None, gpu_memory: str | int | None = None) -> Device:
    """Return the GPU named `name`; `gpu_memory` (`80GiB` or bytes) overrides its capacity.

    If `name` is None, return this machine's GPU or else `GENERIC`, which has unlimited memory, and
    an A100's capability and cuBLAS workspace. An unknown name or malformed size raises InputError.
    """
    if isinstance(name, Device):
        device = name
    elif name is None:
        device = present_device() if torch.cuda.is_available() else GENERIC
    elif isinstance(name, str) and name.lower() in _GPUS:
        device = _GPUS[name.lower()]
    else:
        raise InputError(
            f"{unknown('GPU', name, _GPUS)} (or give only its memory, gpu_memory='80GiB')"
        )
    if gpu_memory is None:
        return device
    return replace(device, capacity_bytes=parse_size(gpu_memory))


def present_device(index: int = 0, *, free_only: bool = False) -> Device:
    """Describe a GPU of this machine; with `free_only`, its capacity excludes memory in use.

    All memory of this process's allocator counts as free, and its CUDA context as used. So with
    `free_only`, the description's `context_*` hold only what a run still adds to the context.
    """
    properties = torch.cuda.get_device_properties(index)
    capacity_bytes = properties.total_memory
    if free_only:
        capacity_bytes = torch.cuda.mem_get_info(index)[0] + torch.cuda.memory_reserved(index)
    device = describe_device(properties.name, capacity_bytes, (properties.major, properties.minor))
    return replace(device, **_CONTEXT_GROWTH) if free_only else device


def mib(n_bytes: float) -> str:
    """Return a size in bytes as text, such as `1234.5 MiB`."""
    return f"{n_bytes / MIB:.1f} MiB"
