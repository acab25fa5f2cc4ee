"""Fused forward and backward of a TResNet's stem and stages, by Triton kernels.

    model.runner = fused.Runner(impl="auto", recompute="activations")  # `tresnet.create` does this

| file | holds |
|---|---|
| `read.py` | reads modules into blocks, and raises an error for modules that cannot be fused |
| `blocks.py` | residual blocks as tuples, with indices in place of tensors |
| `prepare.py` | casts convolution weights, and pads channels of parameters: one autograd node |
| `stage.py` | forward and backward of consecutive blocks: one autograd node |
| `run.py` | divides a model into groups, runs each, and updates running statistics |
| `compare.py` | compares a model's kernels with their definitions in plain PyTorch |
| `selfcheck.py` | runs that comparison in another process, and stores the result in a file |
| `runner.py` | lets kernels run only after that comparison, once for each GPU and model |

Each call of a model reads the modules again. A stage with hooks or with modules of unknown classes
runs as plain PyTorch modules. So does the whole model while a tracer or a transform is active.
"""

from tresnet.fused.runner import Runner, implementation

__all__ = ["Runner", "implementation"]
