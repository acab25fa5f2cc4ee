"""`tresnet predict`: name the classes of image files."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import BAD_IMAGE_EXIT_CODE, one_line, progress, say
from tresnet.errors import InputError, TResNetError
from tresnet.settings import (
    BatchSize,
    Build,
    ClassMap,
    DeviceName,
    InferenceCompute,
    MaxImagePixels,
    WeightsName,
)
from tresnet.settings.fields import Count, Fraction
from tresnet.writing import as_write_error, atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

    from tresnet.predictions import Prediction, Predictor


def predict(
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE [IMAGE ...]")],
    *,
    device: DeviceName = "auto",
    class_map: ClassMap = None,
    max_image_pixels: MaxImagePixels = None,
    weights: WeightsName,
    top_k: Count | None = None,
    threshold: Fraction | str | None = None,
    format: Literal["table", "json", "csv"] = "table",
    batch_size: BatchSize = 32,
    runtime: Literal["torch", "onnx"] = "torch",
    cam: Path | None = None,
    build: Build,
    compute: InferenceCompute,
) -> int:
    """Name the likeliest classes of each image file, with their probabilities.

    Args:
        images: Image files, folders, quoted patterns such as '*/7/*.png', or - to read paths from
            standard input. An unreadable image is reported as an error; the other images are still
            predicted.
        top_k: Number of classes to name for each image, the likeliest first. None: 1, or for many
            labels all from --threshold.
        threshold: Lowest probability of the classes to name: a number, or a JSON file with one for
            each class, as an object by their names or a list in the order of the outputs. None: for
            many labels without --top-k the threshold that the weights hold, otherwise 0.
        format: Output. table: a line per image. json: a list of objects. csv: a row per named
            class.
        runtime: torch: PyTorch runs the model. onnx: onnxruntime runs the file that --weights
            names, made by `tresnet export --format onnx`, on the CPU; options of device, model and
            step have no effect.
        cam: New directory for a Grad-CAM picture of each image (needs torchcam). Red regions
            support the likeliest class most.
    """
    from tresnet.data import labels
    from tresnet.predictions import Predictor

    names = [line for name in images for line in (_lines() if name == "-" else [name])]
    if not names:
        raise InputError("expected at least one image file, got none")
    predictor = Predictor(
        weights,
        top_k=top_k,
        threshold=threshold,
        batch_size=batch_size,
        runtime=runtime,
        maps=cam is not None,
        device=device,
        build=build,
        compute=compute,
        say=progress,
        classes=labels.class_map(class_map),
        max_image_pixels=max_image_pixels,
    )
    write = {"table": _table, "json": _json, "csv": _csv}[format]
    return _run(predictor, names, write, cam)


def _run(
    predictor: "Predictor", names: list[str], write: Callable[..., None], cam: Path | None
) -> int:
    from tresnet.predictions import find_images

    if cam is not None:
        if cam.exists():
            raise InputError(f"expected a new directory for --cam, but {cam} exists: remove it")
        with as_write_error(cam):
            cam.mkdir(parents=True)
    paths, bad = find_images(names, predictor.reader), list[TResNetError]()
    predictions = predictor(
        paths, bad=lambda error: (bad.append(error), progress(f"error: {one_line(str(error))}"))
    )
    write(_with_maps_saved(predictions, cam), max(map(len, paths)))
    return BAD_IMAGE_EXIT_CODE if bad else 0


def _lines() -> list[str]:
    return [line.rstrip("\r\n") for line in sys.stdin if line.strip()]


def _with_maps_saved(
    predictions: "Iterator[Prediction]", folder: Path | None
) -> "Iterator[Prediction]":
    for number, prediction in enumerate(predictions):
        picture: Image | None = prediction.map
        if folder is not None and picture is not None:
            # Files of two folders may have the same stem. File systems count a name's bytes.
            stem = os.fsencode(Path(prediction.image).stem)[:200].decode(errors="ignore")
            with atomic_write(folder / f"{number:05}_{stem}.png") as temporary:
                picture.save(temporary, "PNG")
        yield prediction


def _table(predictions: "Iterator[Prediction]", width: int) -> None:
    """Print lines such as `digit.png: 7 (99.8 %), 1 (0.1 %)`; pad file names to one width."""
    for prediction in predictions:
        pairs = zip(prediction.short_names, prediction.probabilities, strict=True)
        classes = [f"{name} ({100 * chance:.1f} %)" for name, chance in pairs]
        say(one_line(f"{prediction.image + ':':{width + 1}} {', '.join(classes) or 'none'}"))


def _json(predictions: "Iterator[Prediction]", _: int) -> None:
    separator = "[\n"
    for prediction in predictions:
        row = {
            "image": prediction.image,
            "predictions": [
                {"class": name, "number": number, "probability": chance}
                for name, number, chance in _classes(prediction)
            ],
        }
        say(separator + json.dumps(row), end="")
        separator = ",\n"
    say("\n]" if separator == ",\n" else "[]")


def _csv(predictions: "Iterator[Prediction]", _: int) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "number", "probability"])
    for prediction in predictions:
        for rank, row in enumerate(_classes(prediction), 1):
            writer.writerow([prediction.image, rank, *row])


def _classes(prediction: "Prediction") -> "Iterator[tuple[str, int, float]]":
    return zip(prediction.classes, prediction.numbers, prediction.probabilities, strict=True)
