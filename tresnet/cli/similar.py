"""`tresnet similar`: rank images by their similarity to an image."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import BAD_IMAGE_EXIT_CODE, format_table, one_line, progress, say
from tresnet.errors import TResNetError
from tresnet.settings import (
    BatchSize,
    Build,
    DeviceName,
    InferenceCompute,
    MaxImagePixels,
    WeightsName,
)
from tresnet.settings.fields import Count


def similar(
    image: Annotated[Positional[str], arg(metavar="IMAGE")],
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="FOLDER [FOLDER ...]")],
    *,
    device: DeviceName = "auto",
    max_image_pixels: MaxImagePixels = None,
    weights: WeightsName,
    top_k: Count = 10,
    format: Literal["table", "csv"] = "table",
    sheet: Path | None = None,
    batch_size: BatchSize = 32,
    build: Build,
    compute: InferenceCompute,
) -> int:
    """Rank images by their similarity to an image: the cosine of the model's pooled features.

    Args:
        image: Image file to compare with.
        images: Folders, image files or quoted patterns to rank. Unreadable images are reported as
            errors.
        top_k: Number of images to name, the most similar first.
        format: Output. table: aligned columns. csv: a row for each image.
        sheet: New PNG file for thumbnails of the image and of those that are named.
    """
    from tresnet import predictions

    bad: list[TResNetError] = []
    ranking = predictions.similar(
        image,
        images,
        weights=weights,
        batch_size=batch_size,
        device=device,
        build=build,
        compute=compute,
        max_image_pixels=max_image_pixels,
        say=progress,
        bad=lambda error: (bad.append(error), progress(f"error: {one_line(str(error))}")),
        top_k=top_k,
        sheet=sheet,
    )
    header = "rank", "similarity", "image"
    rows = [(str(n), f"{one.similarity:.6f}", one.image) for n, one in enumerate(ranking, 1)]
    if format == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])
    else:
        say(format_table(header, rows))
    return BAD_IMAGE_EXIT_CODE if bad else 0
