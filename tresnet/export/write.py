"""Writes a model in another runtime's format and checks the file against the model."""

import contextlib
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.data import ImageDataset
from tresnet.env import package_version
from tresnet.errors import ExportError, InputError
from tresnet.export.formats import Format, Job, Run, find_format
from tresnet.export.images import Images, Input, open_labelled, spread
from tresnet.export.plain import plain_model, trace
from tresnet.files import atomic_write
from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats

CALIBRATION_IMAGES = 512
TOP1_IMAGES = 5000
# In points of a hundred: 8 bits may change the likeliest class of some images; else rounding may, of
# one image in ten thousand.
INT8_TOP1_FALL = 0.3
TOP1_FALL = 0.01


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    Attributes:
        format: 'onnx', 'pt2', 'aoti' or 'openvino'.
        input: 'float' for images in [0, 1], 'uint8' for bytes.
        input_size: height and width in pixels; None as the weights were made for.
        dynamic_size: take other heights and widths too; the number of images is free anyway.
        channels_last: of aoti: take images in channels-last memory.
        int8: of onnx and pt2: weights and activations of 8 bits.
        data: directory with train/CLASS and val/CLASS image folders: int8's ranges are those of
            images of train, and top-1 is compared on images of val.
        overwrite: replace the output if it exists.
    """

    format: str = "onnx"
    input: Input = "float"
    input_size: int | None = None
    dynamic_size: bool = False
    channels_last: bool = False
    int8: bool = False
    data: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Exported:
    """What was written and how it compares.

    Attributes:
        path: the file.
        difference: largest of any logit to the model's, as a share of the largest and of 1.
        images: on how many real images top-1 was compared.
        model_top1: per cent of them that the model names rightly; None without data.
        top1: the same of the file.
    """

    path: Path
    difference: float
    images: int = 0
    model_top1: float | None = None
    top1: float | None = None


def export_model(
    model: nn.Module,
    path: Path,
    options: ExportOptions,
    *,
    classes: tuple[str, ...] | None = None,
    labels: str = "single",
) -> Exported:
    """Write a model, folded, in another runtime's format; the file is there once it is checked.

    Args:
        model: a TResNet in eval mode, its weights in float32; unchanged.
        path: the file to write; openvino writes a second one beside it, ending in .bin.
        options: the format and what the model takes.
        classes: names of the classes, kept in the file.
        labels: 'single', or 'multi' where an image may have several; kept in the file.

    Raises:
        InputError: model, path or options do not fit.
        MissingDependencyError: a package that the format needs is not installed.
        DataError: the images are incomplete or cannot be read.
        ExportError: the file does not compute what the model does; nothing is left of it.
        WriteError: it cannot be written.
    """
    format = find_format(options.format, options.int8)
    _check_options(path, options, format)
    plain = plain_model(model)
    assert isinstance(model, TResNet), "checked by plain_model"
    images = _images(model, options)
    train, val = _data(model, images, options, classes, labels)
    device = next(plain.parameters()).device
    if options.format != "aoti":
        plain, device = plain.cpu(), torch.device("cpu")
    if options.channels_last:
        plain = plain.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    job = Job(
        trace(plain, images, device),
        images,
        _metadata(model, images, device, classes, labels, options),
        None if train is None else _calibration(train, images),
    )
    with contextlib.ExitStack() as stack:
        # Placed in the opposite order: the file that the user names comes last.
        places = {
            suffix: stack.enter_context(atomic_write(path.with_suffix(suffix)))
            for suffix in format.suffixes
        }
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / f"model{format.suffixes[0]}"
        format.write(job, file)
        opened = format.open(file)

        def run(batch: Tensor) -> Tensor:
            return opened(images.prepare(batch).to(device)).cpu()

        difference = max(_difference(run, model, batch) for batch in images.samples())
        if not options.int8 and not difference <= format.limit:
            raise ExportError(
                f"expected logits within {format.limit:g} of the model's, got {difference:.2g} from "
                f"the {options.format} file, which was removed: report it with the command"
            )
        real = (0, None, None) if val is None else _top1(run, model, val, options)
        for suffix, place in places.items():
            shutil.copyfile(file.with_suffix(suffix), place)
    return Exported(path, difference, *real)


def _check_options(path: Path, options: ExportOptions, format: Format) -> None:
    if path.suffix != format.suffixes[0]:
        raise InputError(
            f"expected an output that ends in {format.suffixes[0]} for {options.format}, got {path}"
        )
    for suffix in format.suffixes:
        if path.with_suffix(suffix).exists() and not options.overwrite:
            raise InputError(
                f"expected a new file to write, but {path.with_suffix(suffix)} exists: choose "
                "another name, or overwrite it"
            )
    if not path.absolute().parent.is_dir():
        raise InputError(f"expected a directory to write to, but {path.parent} does not exist")
    if options.input not in ("float", "uint8"):
        raise InputError(f"expected input 'float' or 'uint8', got {options.input!r}")
    if options.channels_last and options.format != "aoti":
        raise InputError(f"channels_last is for aoti alone, got format {options.format!r}")
    if options.dynamic_size and options.format == "aoti":
        raise InputError(
            "aoti takes one size, as packages compiled for any computed NaN in other sizes (torch "
            "2.15): export one for each size, or take format 'pt2'"
        )
    if options.int8 and options.data is None:
        raise InputError(
            "int8 needs data, a directory of images (train/CLASS, val/CLASS), to take the ranges from"
        )


def _images(model: TResNet, options: ExportOptions) -> Images:
    config = model.config
    side = options.input_size or model.pretrained_cfg["input_size"][-1]
    images = Images(
        config.in_chans,
        side,
        side,
        config.block_size,
        options.dynamic_size,
        options.input,
        options.channels_last,
    )
    if side % images.multiple or side < images.least:
        raise InputError(
            f"expected an input_size divisible by {images.multiple} and at least {images.least}, "
            f"got {side}"
        )
    return images


def _data(
    model: TResNet,
    images: Images,
    options: ExportOptions,
    classes: tuple[str, ...] | None,
    labels: str,
) -> tuple[ImageDataset | None, ImageDataset | None]:
    """Images to calibrate with, and to compare top-1 on, where there are to be any."""
    if options.data is None:
        return None, None
    if labels != "single" or images.channels != 3:
        raise InputError(
            f"data is for models of one label and 3 channels, got labels {labels!r} and "
            f"{images.channels} channels: leave it out"
        )
    val = open_labelled(options.data, "val", model, images, classes)
    if not options.int8:
        return None, val
    return open_labelled(options.data, "train", model, images, classes), val


def _metadata(
    model: TResNet,
    images: Images,
    device: torch.device,
    classes: tuple[str, ...] | None,
    labels: str,
    options: ExportOptions,
) -> dict[str, Any]:
    """What is stored in the file: plain values."""
    kept = ("crop_pct", "crop_mode", "interpolation")
    return {
        "model": model.config.variant,
        "tresnet": package_version(),
        "torch": torch.__version__,
        "images": asdict(images),
        "preprocessing": {key: model.pretrained_cfg.get(key) for key in kept},
        "num_classes": model.config.num_classes,
        "classes": None if classes is None else list(classes),
        "labels": labels,
        "int8": options.int8,
        "device": str(device),
    }


def _calibration(train: ImageDataset, images: Images) -> list[Tensor]:
    return [images.prepare(batch) for batch, _ in spread(train, CALIBRATION_IMAGES)]


def _top1(
    run: Run, model: TResNet, val: ImageDataset, options: ExportOptions
) -> tuple[int, float, float]:
    """On how many real images top-1 was compared, the model's and the file's in per cent."""
    count = right = model_right = 0
    for batch, targets in spread(val, TOP1_IMAGES):
        count += len(batch)
        right += int((run(batch).argmax(1) == targets).sum())
        model_right += int((_logits(model, batch).argmax(1) == targets).sum())
    top1, model_top1 = 100 * right / count, 100 * model_right / count
    allowed = INT8_TOP1_FALL if options.int8 else TOP1_FALL
    if model_top1 - top1 > allowed:
        raise ExportError(
            f"expected top-1 within {allowed} points of the model's {model_top1:.2f} % on "
            f"{count} images of {options.data}, got {top1:.2f} % from the {options.format} file, "
            "which was removed" + (": export without int8" if options.int8 else "")
        )
    return count, model_top1, top1


def _difference(run: Run, model: TResNet, batch: Tensor) -> float:
    """The largest difference of logits, as a share of the largest logit and of 1."""
    expected, got = _logits(model, batch), run(batch)
    if not bool(expected.isfinite().all()):
        raise ExportError("expected finite logits, but the model itself gives infinities or NaN")
    if got.shape != expected.shape or not bool(got.isfinite().all()):
        raise ExportError(
            f"expected finite logits of shape {tuple(expected.shape)}, got shape {tuple(got.shape)} "
            "or values that are not finite from the file, which was removed"
        )
    return float((got - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _logits(model: TResNet, batch: Tensor) -> Tensor:
    """The model's own logits of bytes, on the CPU."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        return model(unit_floats(batch).to(device)).cpu()
