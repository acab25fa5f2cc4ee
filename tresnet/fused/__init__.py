"""The program that runs a plain model on a GPU, with fewer passes over maps and fewer maps kept.

    x = fused.run({"body.layer1": model.body.layer1}, x, fused.How(impl="auto"))

| file | holds |
|---|---|
| `applies.py` | reads the modules of a part at each call, and decides whether the program runs |
| `stage.py` | forward and backward of consecutive blocks, as one node of the graph |
| `padding.py` | channels padded to multiples of 8 within the program |

Nothing is kept between calls. Parts with hooks or other classes, and all parts under tracing or
transforms, run as plain modules; on a CPU, everything does.
"""

from tresnet.fused.applies import RECOMPUTE, How, residual_block, run, run_row

__all__ = ["RECOMPUTE", "How", "residual_block", "run", "run_row"]
