"""GPU memory predicted before the run, explained and compared."""

from tresnet.memory.device import Device, describe_device, find_device, list_devices, present_device
from tresnet.memory.events import Category, Phase
from tresnet.memory.fit import Fits, MaxBatch, max_batch
from tresnet.memory.predict import predict
from tresnet.memory.result import Estimate, Prediction
from tresnet.memory.workspaces import Workspaces

__all__ = [
    "Category",
    "Device",
    "Estimate",
    "Fits",
    "MaxBatch",
    "Phase",
    "Prediction",
    "Workspaces",
    "describe_device",
    "find_device",
    "list_devices",
    "max_batch",
    "predict",
    "present_device",
]
