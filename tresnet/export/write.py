"""Write a model in another runtime's format; keep the file only if its results agree."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tresnet import environment
from tresnet.checkpoints.save import checkpoint_metadata
from tresnet.data.dataset import ImageDataset
from tresnet.errors import ExportError, InputError
from tresnet.export.formats import Format, Job, RunFunction, find_format
from tresnet.export.image_spec import Images, open_labelled, sample_evenly
from tresnet.export.plain import InHalf, plain_model, trace
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import image_size
from tresnet.settings import CROP, ExportOptions, Threshold, sides
from tresnet.settings.fields import check
from tresnet.steps.outputs import finite, ranked
from tresnet.writing import atomic_write, check_target

CALIBRATION_IMAGES = 512
TOP1_IMAGES = 5000
# Allowed fall of top-1 in percentage points. 8-bit values change the classes of some images, and
# rounding in float32 changes the class of one image in ten thousand (0.01 points).
INT8_TOP1_FALL = 0.3
TOP1_FALL = 0.01
# Largest difference of logits in float16, whose rounding errors of 5e-4 add up over the layers.
FP16_LIMIT, FP16_TOP1_FALL = 0.02, 0.1


class Exported(NamedTuple):
    """Result of an export. `model_top1` and `top1` are per cent, or None without `options.data`."""

    path: Path
    difference: float  # largest difference of logits, divided by max(1, largest |logit|)
    images: int = 0  # number of real images on which top-1 was compared
    model_top1: float | None = None
    top1: float | None = None  # top-1 of the exported file


def export_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    options: ExportOptions,
    *,
    classes: tuple[str, ...] | None = None,
    descriptions: tuple[str, ...] | None = None,
    labels: str = "single",
    threshold: Threshold | None = None,
) -> Exported:
    """Fold a model, write it in another runtime's format, and check the file in that runtime.

    Args:
        model: a TResNet in eval mode with weights in float32; it is not changed.
        path: the file to write; openvino also writes a second file, with the suffix .bin.
        options: the format and the images that the exported model accepts.
        classes: names of the classes, which are stored in the file.
        descriptions: the classes in words, if `classes` are ids; stored in the file.
        labels: 'single', or 'multi' if an image may have several labels; stored in the file.
        threshold: the lowest probability of a predicted label, for 'multi', or one for each class;
            stored in the file.

    Raises:
        InputError: the model, the path or an option is not valid.
        MissingDependencyError: a package that the format needs is not installed.
        DataError: `options.data` is incomplete, cannot be read or has other classes.
        ExportError: the file's logits or top-1 differ from the model's; the file was removed.
        WriteError: the file cannot be written.
    """
    check(options, InputError)
    path, format = Path(path), find_format(options)
    _check_options(path, options, format)
    plain, device = _converted(model, options)
    assert isinstance(model, TResNet), "checked by plain_model"
    names = {"classes": classes, "descriptions": descriptions}
    user = {**names, "labels": labels, "threshold": threshold}
    checkpoint_metadata(model, user)  # raises if the number of names is wrong
    images = _images(model, options)
    splits = _open_splits(model, images, user, options)
    sample = sample_evenly(splits["train"], CALIBRATION_IMAGES) if options.int8 else None
    calibration = None if sample is None else [images.prepare(batch) for batch, _ in sample]
    metadata = _metadata(model, images, options) | {**user, "device": str(device)}
    batch_size, limit = options.batch_size or 1, FP16_LIMIT if options.fp16 else format.limit
    job = Job(trace(plain, images, device), images, metadata, calibration, batch_size)
    with _new_files(path, format) as file:
        format.write(job, file)
        opened = format.open(file)

        def run(batch: Tensor) -> Tensor:
            return opened(images.prepare(batch).to(device)).cpu()

        difference = _largest_difference(run, model, images)
        if not options.int8 and not difference <= limit:
            raise ExportError(
                f"expected logits within {limit:g} of the model's, got {difference:.2g} "
                f"from the {options.format} file, which was removed: report this and your command"
            )
        top1 = _top1(run, model, splits["val"], options) if splits else (0, None, None)
    return Exported(path, difference, *top1)


def _converted(model: nn.Module, options: ExportOptions) -> tuple[nn.Module, torch.device]:
    """Return the folded module to trace, in the layout and dtype of `options`, and its device."""
    plain = plain_model(model)
    device = next(plain.parameters()).device
    if options.format != "aoti":
        plain, device = plain.cpu(), torch.device("cpu")
    if options.channels_last:
        plain = plain.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return InHalf(plain) if options.fp16 else plain, device


def _open_splits(
    model: TResNet, images: Images, user: dict[str, Any], options: ExportOptions
) -> dict[str, ImageDataset]:
    if options.data is None:
        return {}
    if user["labels"] != "single" or images.channels != 3:
        raise InputError(
            f"data is for models of one label and 3 channels, got labels {user['labels']!r} and "
            f"{images.channels} channels: leave it out"
        )
    options_of = model, images, user["classes"], options
    splits = ("val", "train") if options.int8 else ("val",)
    return {split: open_labelled(options.data, split, *options_of) for split in splits}


@contextlib.contextmanager
def _new_files(path: Path, format: Format) -> Iterator[Path]:
    """Yield the path of a temporary file; what is written there is copied to `path` at success."""
    with contextlib.ExitStack() as stack:
        # Contexts exit in reverse order, so openvino's .bin file appears before the .xml file.
        targets = {
            suffix: stack.enter_context(atomic_write(path.with_suffix(suffix)))
            for suffix in format.suffixes
        }
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / f"model{format.suffixes[0]}"
        yield file
        for suffix, target in targets.items():
            shutil.copyfile(file.with_suffix(suffix), target)


def _check_options(path: Path, options: ExportOptions, format: Format) -> None:
    suffix = format.suffixes[0]
    existing = next((p for end in format.suffixes if (p := path.with_suffix(end)).exists()), None)
    fault = None
    if path.suffix != suffix:
        fault = f"an output that ends in {suffix} for {options.format}, got {path}"
    elif existing is not None and not options.overwrite:
        fault = f"a new file to write, but {existing} exists: choose another name, or overwrite it"
    elif options.int8 and options.fp16:
        fault = "int8 or fp16, got both"
    elif options.int8 and options.data is None:
        fault = "data with int8, images (train/CLASS, val/CLASS) to take the ranges from, got none"
    if fault is not None:
        raise InputError(f"expected {fault}")
    check_target(path)


def _images(model: TResNet, options: ExportOptions) -> Images:
    size, cfg = options.input_size or image_size(model.pretrained_cfg), model.pretrained_cfg
    kept = {key: cfg[key] for key in ("pixel_dtype", "mean", "std") if "pixel_dtype" in cfg}
    if kept and options.input != "float":
        raise InputError(f"expected input 'float' for pixels of {cfg['pixel_dtype']}, got 'uint8'")
    images = Images(
        model.config.in_chans,
        size,
        model.config.block_size,
        options.dynamic_size,
        options.input,
        options.channels_last,
        **kept,
    )
    if any(side % images.multiple or side < images.least for side in sides(size)):
        raise InputError(
            f"expected an input_size divisible by {images.multiple} and at least {images.least}, "
            f"got {size}"
        )
    return images


def _metadata(model: TResNet, images: Images, options: ExportOptions) -> dict[str, Any]:
    return {
        "model": model.config.variant,
        "tresnet": environment.__version__,
        "torch": torch.__version__,
        "images": asdict(images),
        "preprocessing": {key: model.pretrained_cfg.get(key) for key in CROP},
        "num_classes": model.config.num_classes,
        "int8": options.int8,
        "fp16": options.fp16,
    }


def _top1(
    run: RunFunction, model: TResNet, val: ImageDataset, options: ExportOptions
) -> tuple[int, float, float]:
    """Return the number of images, and the top-1 of the model and of the file in per cent."""
    count = right = model_right = 0
    for batch, targets in sample_evenly(val, TOP1_IMAGES):
        count += len(batch)
        expected, got = _both(run, model, batch)
        right += int((ranked(got, 1)[:, 0] == targets).sum())
        model_right += int((ranked(expected, 1)[:, 0] == targets).sum())
    top1, model_top1 = 100 * right / count, 100 * model_right / count
    allowed = FP16_TOP1_FALL if options.fp16 else TOP1_FALL
    allowed = INT8_TOP1_FALL if options.int8 else allowed
    if model_top1 - top1 > allowed:
        raise ExportError(
            f"expected top-1 within {allowed} points of the model's {model_top1:.2f} % on "
            f"{count} images of {options.data}, got {top1:.2f} % from the {options.format} file, "
            "which was removed" + (": export without int8" if options.int8 else "")
        )
    return count, model_top1, top1


def _both(run: RunFunction, model: TResNet, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the model and of the file; other than finite ones raise ExportError."""
    device = next(model.parameters()).device
    cudnn = torch.backends.cudnn
    # TF32, cuDNN's default for convolutions in float32, has errors larger than the limits.
    tf32, cudnn.allow_tf32 = cudnn.allow_tf32, False
    try:
        with torch.inference_mode():
            expected = model(batch.to(device)).cpu()
        got = run(batch)
    finally:
        cudnn.allow_tf32 = tf32
    if not finite(expected).all():
        raise ExportError("expected finite logits, but the model itself gives infinities or NaN")
    if got.shape != expected.shape or not finite(got).all():
        raise ExportError(
            f"expected finite logits of shape {tuple(expected.shape)}, got shape {tuple(got.shape)}"
            " or values that are not finite from the file, which was removed"
        )
    return expected, got


def _largest_difference(run: RunFunction, model: TResNet, images: Images) -> float:
    """Return the largest difference of logits; logits above 1 count relative to the largest."""
    differences = []
    for batch in images.samples():
        expected, got = _both(run, model, batch)
        differences.append((got - expected).abs().max() / expected.abs().max().clamp(min=1))
    return float(max(differences))
