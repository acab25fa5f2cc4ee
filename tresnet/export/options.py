"""Options of an export. The string below each field is its help on the command line."""

from dataclasses import dataclass
from typing import Literal

from tresnet.settings import DataColumns, StepInput


@dataclass(frozen=True)
class ExportOptions(StepInput, DataColumns):
    """Options of an export and of the exported model's input."""

    format: Literal["onnx", "pt2", "aoti", "openvino"]
    """onnx: for onnxruntime and other runtimes. pt2: a program of torch.export. aoti: compiled by
    AOTInductor for this kind of machine. openvino: for Intel's CPUs."""
    dynamic_size: bool = False
    """Accept images of other heights and widths too. The number of images is never fixed."""
    channels_last: bool = False
    """For aoti: compile for images in channels-last memory format."""
    int8: bool = False
    """For onnx and pt2: use 8-bit weights and activations, with ranges measured on --data."""
    data: str | None = None
    """Directory of class folders or Hugging Face datasets, hf-hub:USER/NAME or a URL, with splits
    train and val. The export fails if top-1 on val falls by over 0.01 points, or by over 0.3 with
    --int8. --int8 measures ranges on train."""
    overwrite: bool = False
    """Replace the output if it exists."""
