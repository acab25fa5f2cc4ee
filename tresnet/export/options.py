"""Options of an export. The text under a field is its help on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tresnet.settings import StepInput


@dataclass(frozen=True)
class ExportOptions(StepInput):
    """Options of an export and of the exported model's input."""

    format: Literal["onnx", "pt2", "aoti", "openvino"]
    """onnx: for onnxruntime and others. pt2: the program of torch.export. aoti: compiled by
    AOTInductor for this kind of machine. openvino: for Intel's CPUs."""
    dynamic_size: bool = False
    """Accept other heights and widths too. Any number of images is always accepted."""
    channels_last: bool = False
    """For aoti: accept images in channels-last memory."""
    int8: bool = False
    """For onnx and pt2: use 8-bit weights and activations, with ranges measured on --data."""
    data: Path | None = None
    """Directory with train/CLASS and val/CLASS image folders. The file's top-1 on val must equal
    the model's. With --int8, train determines the ranges, and top-1 may be 0.3 points lower."""
    overwrite: bool = False
    """Replace the output if it exists."""
