"""The fused program: it runs a model's stages with fewer passes over feature maps, and saves fewer.

    model.runner = fused.Runner(impl="auto", recompute="activations")  # `tresnet.create` does this

| file | holds |
|---|---|
| `row.py` | a row of blocks: convolutions, norms and shortcuts, without their tensors |
| `read.py` | reads modules into a row; all refusals |
| `prepare.py` | copies of parameters in the maps' dtype and padded widths: one autograd node |
| `stage.py` | forward and backward of a row of blocks: one autograd node, a function of tensors |
| `run.py` | chooses kernels or plain modules, and writes running statistics |
| `selfcheck.py` | compares a model's kernels with their definitions, before their first use |

No state is kept between calls. A part of a model, such as a stage, runs as plain modules if it has
hooks or unknown classes, or if a tracer or transform is active.
"""

from tresnet.fused.run import Runner, implementation

__all__ = ["Runner", "implementation"]
