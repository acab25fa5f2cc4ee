"""Fused forward and backward of a TResNet's stem and stages, by Triton kernels.

    model.runner = fused.Runner(impl="auto", recompute="activations")  # `tresnet.create` does this

| file | holds |
|---|---|
| `groups.py` | the runner: divides a model into groups, and runs each by kernels or plainly |
| `module_reader.py` | reads a group's modules into blocks, and refuses what cannot be fused |
| `block_specs.py` | residual blocks as tuples, with indices in place of tensors |
| `first_use.py` | compares a group's kernels with their definitions before they are used |
| `execution.py` | runs a group: random numbers, running statistics, and the next two files |
| `cast_and_pad.py` | casts convolution weights, pads channels: one autograd node |
| `stage.py` | forward and backward of consecutive blocks: one autograd node |

A call passes `Runner.__call__`, `run_fused`, `StageFunction.forward` and `forward_block`, which
calls `tresnet.ops`. Without gradients, and for frozen blocks in front, `run_fused` calls
`forward_block` directly. Each call of a model reads the modules again. A stage with hooks or with
modules of unknown classes runs as plain PyTorch modules. So does the whole model while a tracer or
a transform is active.
"""

from tresnet.fused.groups import Runner, implementation

__all__ = ["Runner", "implementation"]
