"""One colour a category, the same in pictures and pages.

Hues of Okabe and Ito's set, which people with colour blindness can tell apart, and tints of them.
"""

from tresnet.memory.events import Category

COLORS = {
    Category.PARAMETERS: "#0072b2",
    Category.BUFFERS: "#5fa8d3",
    Category.GRADIENTS: "#d55e00",
    Category.OPTIMIZER: "#8c564b",
    Category.EMA: "#b07aa1",
    Category.BUCKETS: "#e6a157",
    Category.INPUT: "#7f7f7f",
    Category.CAST_WEIGHTS: "#56b4e9",
    Category.ACTIVATIONS: "#009e73",
    Category.ACTIVATION_GRADIENTS: "#f0c419",
    Category.TEMPORARY: "#cc79a7",
    Category.WORKSPACE: "#4d4d4d",
    Category.ROUNDING: "#c8c8c8",
}
