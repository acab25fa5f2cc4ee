"""GPU memory predicted before the run, and explained.

A step of `tresnet.steps` runs on fake tensors; its allocations and frees are a trace; the trace is
run through a simulated allocator. If a prediction is wrong, make a small module of the suspected
layers. Its prediction prints the buffers that are alive at the peak. `[one.name for one in
prediction.trace.operations]` are the operations that ran; they should be those of a GPU. Then read
here:

| what is wrong | where |
|---|---|
| the wrong step is predicted: model, settings, batch, loss | `plan.py`, `prediction.py` |
| the arguments of a model that takes no images | `inputs.py` |
| the optimizer, the EMA, loss scaling, clipping | `tresnet/steps`, `patches.py` |
| other operations run than on a GPU, or return another layout or dtype (autocast) | `patches.py` |
| the weights and buffers, their order on the device, DDP's buckets | `machine.py` |
| attention: which kernel runs and what it keeps | `attention.py` |
| recurrent layers: what cuDNN keeps of them | `recurrent.py` |
| a tensor lives too long or dies too early in backward | `walk.py` |
| a buffer is missing, counted twice or in the wrong category | `recorder.py` |
| cuDNN's or another kernel's workspace | `workspaces.py` |
| allocated is right but reserved is not | `allocator.py` |
| the sums, the peak, its band | `replay.py`, `prediction.py` |
| cuBLAS's workspace, the context, the size of a GPU | `device.py` |
| the largest batch | `fit.py` |

Every change to torch's internals is in `patches.py`; a test in `tests/memory/test_patches.py` fails
when torch has changed.
"""

from tresnet.memory.device import Device, describe_device, find_device, list_devices, present_device
from tresnet.memory.fit import Fits, MaxBatch, max_batch
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
