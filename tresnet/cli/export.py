"""`tresnet export`: a model for another runtime."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a model in another runtime's format; the file appears once it computes the same."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A tag out of `tresnet list` or a file of weights; or a model's name, for random weights."""

    format: Literal["onnx", "pt2", "aoti", "openvino"]
    """onnx: for onnxruntime and others. pt2: the program of torch.export. aoti: compiled by
    AOTInductor for this kind of machine. openvino: for Intel's CPUs."""

    output: Path | None = None
    """The file to write. None: named after the model, in the current directory."""

    input: Literal["float", "uint8"] = "float"
    """float: images in [0, 1]. uint8: bytes, divided by 255 inside."""

    input_size: int | None = None
    """Height and width in pixels. None: as the weights were made for."""

    dynamic_size: bool = False
    """Take other heights and widths too. The number of images is free in any case."""

    channels_last: bool = False
    """For aoti: take images in channels-last memory."""

    int8: bool = False
    """For onnx and pt2: 8-bit weights and activations, their ranges from --data."""

    data: Path | None = None
    """Directory with train/CLASS and val/CLASS image folders. Top-1 on val must be the model's; with
    --int8, whose ranges are those of images of train, at most 0.3 points lower."""

    overwrite: bool = False
    """Replace the output if it exists."""

    def run(self, argv: list[str]) -> int:
        """Export and print how the file compares."""
        from tresnet.checkpoints import create, open_weights
        from tresnet.export import FORMATS, ExportOptions, export_model
        from tresnet.models.zoo import list_models

        name, known = self.model, None
        if name in list_models():
            model = create(name)
        else:
            opened = open_weights(name)
            opened.check_finite()
            model, known = create(weights=opened), opened.info
            if known.entry is None:
                name = Path(name).stem
        suffix = FORMATS[self.format].suffixes[0]
        fields = dataclasses.fields(ExportOptions)
        done = export_model(
            model.eval(),
            self.output or Path(f"{name}{suffix}"),
            ExportOptions(**{field.name: getattr(self, field.name) for field in fields}),
            classes=known and known.classes,
            labels="single" if known is None else known.user.get("labels", "single"),
        )
        rows = [["largest difference of logits", f"{done.difference:.1e}"]]
        if done.images:
            rows += [
                [f"top-1 on {done.images} images", f"{done.top1:.2f} %"],
                ["the model's", f"{done.model_top1:.2f} %"],
            ]
        say(format_table([str(done.path), ""], rows))
        return 0
