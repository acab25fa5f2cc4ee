"""The fused program: it runs blocks with fewer passes over feature maps and keeps fewer maps.

    x = fused.run({"body.layer1": model.body.layer1}, x, fused.How(impl="auto"))

| file | holds |
|---|---|
| `applies.py` | reads the modules at each call; chooses the fused program or plain modules |
| `stage.py` | forward and backward of consecutive blocks, as one node of the autograd graph |
| `padding.py` | pads channels to multiples of 8 within the program |

No state is kept between calls. A part of a model, such as a stage, runs as plain modules if it has
hooks or unknown classes, or if a tracer or transform is active. A part on a CPU also runs as
plain modules if `impl` is "auto", unless its norms share batch statistics between processes.
"""

from tresnet.fused.applies import RECOMPUTE, How, residual_block, run, run_row

__all__ = ["RECOMPUTE", "How", "residual_block", "run", "run_row"]
