"""A GPU's way through the plain modules of a model: fewer passes over its maps, fewer maps kept.

    x = fused.run({"body.layer1": model.body.layer1}, x, fused.How(impl="auto"))

| file | holds |
|---|---|
| `applies.py` | reads the modules of a part at each call, and decides which way it goes |
| `padding.py` | pads channels to multiples of 8 for the time of a call |
| `stage.py` | forward and backward of blocks in a row, as one node of the graph |

Nothing is kept between calls. What the program does not know (hooks, other classes, tracing,
transforms) runs as plain modules; so does everything on a CPU.
"""

from tresnet.fused.applies import RECOMPUTE, How, residual_block, run, run_row

__all__ = ["RECOMPUTE", "How", "residual_block", "run", "run_row"]
