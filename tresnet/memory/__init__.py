"""Prediction of the GPU memory of a training step or an inference before it runs.

A step of `tresnet.steps` runs on fake tensors, which have no data. A trace records the step's
allocations and frees, and a simulated allocator replays the trace. If a prediction is wrong,
predict a small module of the suspected layers, and measure this module on a GPU.
`print(prediction)` shows each category's bytes at the peak. Compare
`prediction.trace.operations` with the operations that the GPU runs. Then read one of these files:

| what is wrong | file to read |
|---|---|
| the wrong step is predicted: model, settings, batch, loss | `plan.py`, `prediction.py` |
| the optimizer, the EMA, loss scaling, clipping | `tresnet/steps`, `patches.py` |
| an operation, its layout or its dtype (autocast) is not that of a GPU | `patches.py` |
| the weights and buffers, their order on the device, DDP's buckets | `machine.py` |
| attention: the kernel that runs, the tensors that it saves | `attention.py` |
| a tensor is freed too late or too early in backward | `backward.py` |
| an allocation is missing, counted twice or in the wrong category | `recorder.py` |
| cuDNN's or another kernel's workspace | `workspaces.py` |
| the allocated bytes are right, but the reserved bytes are not | `allocator.py` |
| the sums by category, the peak, the bounds of the peak | `replay.py`, `prediction.py` |
| cuBLAS's workspace, the CUDA context, the size of a GPU | `device.py` |
| the largest batch | `capacity.py` |

Every patch of torch's internals is in `patches.py`. `tests/memory/test_patches.py` fails if a patch
is no longer needed, or if torch no longer calls the patched code.
"""

from tresnet.memory.capacity import Fits, MaxBatch, max_batch
from tresnet.memory.device import Device, describe_device, find_device, list_devices, present_device
from tresnet.memory.prediction import Estimate, MemoryPrediction, predict
from tresnet.memory.trace import Category, Phase

__all__ = [
    "Category",
    "Device",
    "Estimate",
    "Fits",
    "MaxBatch",
    "MemoryPrediction",
    "Phase",
    "describe_device",
    "find_device",
    "list_devices",
    "max_batch",
    "predict",
    "present_device",
]
