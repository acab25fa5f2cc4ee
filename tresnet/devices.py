"""Check names of devices, and read a GPU's capability, description and memory use."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tresnet.errors import InputError

MIB = 2**20


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device `name`, with an index for CUDA; an unusable device raises InputError.

    'auto' is a GPU if one is available, otherwise the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"expected a device such as cpu or cuda:0, got {name!r}") from error
    if device.type == "meta":
        raise InputError(f"expected a device that computes, such as cpu or cuda:0, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise InputError(
                f"expected a device of this machine, got {name!r}, but PyTorch sees {count} CUDA "
                "devices: use cpu, or check the driver and CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", index)
    try:
        torch.empty(0, device=device)
    except Exception as error:  # an absent backend may raise an error of any type
        reason = str(error).partition(". ")[0]  # the rest of the message lists all backends
        raise InputError(
            f"expected a device of this machine, got {name!r} ({reason}): use cpu or cuda"
        ) from error
    return device


def timed_device(name: str) -> torch.device:
    """Return the CPU or CUDA device `name`; raise InputError for devices that cannot be timed."""
    device = usable_device(name)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"expected a device that can be timed, cpu or cuda, got {name!r}")
    return device


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or None for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def nvml_handle(device: torch.device | str | int) -> Any | None:
    """Return NVML's handle of a CUDA device, or None if NVML is missing or has no such device.

    NVML numbers every GPU of the machine in PCI order and ignores CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER. Therefore the GPU is looked up by the UUID that CUDA reports. A MIG slice is
    looked up by its name in CUDA_VISIBLE_DEVICES.
    """
    pynvml = _nvml()
    if pynvml is None:
        return None
    chosen = torch.device(device)
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    uuid = torch.cuda.get_device_properties(index).uuid
    names = [f"GPU-{uuid}", f"MIG-{uuid}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().startswith("MIG-"):
        names.insert(0, visible[index].strip())
    for name in names:
        handle = _nvml_call(pynvml, pynvml.nvmlDeviceGetHandleByUUID, name)
        if handle is not None:
            return handle
    return None


def device_used_bytes(handle: Any | None) -> int | None:
    """Return the GPU memory that all processes use, in bytes, or None if NVML cannot read it."""
    pynvml = _nvml()
    if pynvml is None or handle is None:
        return None
    info = _nvml_call(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return None if info is None else int(info.used)


@functools.cache
def _nvml() -> ModuleType | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the package, NVML itself or a driver is missing
        return None
    return pynvml


def _nvml_call(pynvml: ModuleType, function: Callable[..., Any], *arguments: Any) -> Any | None:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return name, memory, capability, power limit and driver of a GPU as JSON values."""
    properties = torch.cuda.get_device_properties(device)
    gpu: dict[str, Any] = {
        "type": "cuda",
        "name": properties.name,
        "memory_mib": properties.total_memory / MIB,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "power_limit_w": None,
        "driver": None,
    }
    pynvml, handle = _nvml(), nvml_handle(device)
    if pynvml is not None:
        driver = _nvml_call(pynvml, pynvml.nvmlSystemGetDriverVersion)
        gpu["driver"] = driver.decode() if isinstance(driver, bytes) else driver
        if handle is not None:
            limit_mw = _nvml_call(pynvml, pynvml.nvmlDeviceGetPowerManagementLimit, handle)
            gpu["power_limit_w"] = None if limit_mw is None else limit_mw / 1000
    return gpu
