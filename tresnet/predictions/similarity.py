"""Rank images by their similarity to an image, and draw the ranking."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import functional

from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.data.channels import ImageReader
from tresnet.errors import InputError
from tresnet.predictions.pictures import Source
from tresnet.predictions.predictor import open_torch
from tresnet.predictions.reader import Bad, outputs, raise_error
from tresnet.settings import Build, InferenceCompute
from tresnet.steps.compiled import Say, log
from tresnet.writing import atomic_write, check_target

_SIDE, _GAP, _COLUMNS = 160, 8, 6  # of a thumbnail and around it, in pixels; thumbnails in a row


class Similar(NamedTuple):
    """An image and its similarity, in [-1, 1], to the image that was asked for."""

    image: str
    similarity: float


def similar(
    image: Source,
    images: Source | Iterable[Source],
    *,
    weights: Any,
    batch_size: int = 32,
    device: str = "auto",
    build: Build | None = None,
    compute: InferenceCompute | None = None,
    max_image_pixels: int | None = None,
    say: Say = log,
    bad: Bad = raise_error,
    top_k: int | None = None,
    sheet: str | os.PathLike[str] | None = None,
) -> list[Similar]:
    """Return `images` by decreasing similarity to `image`: the cosine of the pooled features.

    `tresnet.predict` says what images may be; `Predictor` explains the options and their errors.
    `bad` receives the errors of `images`, which are then left out. An unreadable `image` is raised.
    The result has the `top_k` first images, or all. `sheet` is a new PNG file for thumbnails of
    `image` and of the result, all of which must be paths.

    Raises:
        InputError: `top_k` is no number from 1 on; or the file `sheet` exists, or cannot show the
            images, because they are not RGB.
        WriteError: the directory of `sheet` does not exist, or it cannot be written.
    """
    if top_k is not None and not (isinstance(top_k, int) and top_k > 0):
        raise InputError(f"expected top_k of at least 1, a whole number, got {top_k!r}")
    info = open_checkpoint(weights)
    if sheet is not None:
        several: Any = [images] if isinstance(images, str | os.PathLike) else images
        images = [*several]
        _check_sheet(sheet, info, [image, *images])
    parts = build or Build(), compute or InferenceCompute()
    backend = open_torch(info, device, *parts, say, max_image_pixels, features=True)
    options = backend.images, batch_size
    wanted = [
        one
        for names, _, rows in outputs(image, *options, raise_error)
        for one in zip(names, rows, strict=True)
    ]
    if len(wanted) != 1:
        raise InputError(f"expected one image to compare with, got {len(wanted)}: {image!r:.80}")
    unit = functional.normalize(wanted[0][1].double(), dim=0)
    ranking = []
    for names, _, features in outputs(images, *options, bad):
        cosines = functional.normalize(features.double(), dim=1) @ unit
        ranking += map(Similar, names, cosines.clamp(-1, 1).tolist())
    ranking = sorted(ranking, key=lambda one: -one.similarity)[:top_k]
    if sheet is not None:
        cells = [(wanted[0][0], "image"), *((name, f"{cos:.4f}") for name, cos in ranking)]
        _draw_sheet(Path(sheet), cells, backend.images.reader)
    return ranking


def _check_sheet(sheet: Any, info: Checkpoint, images: list[Any]) -> None:
    if os.path.exists(sheet):
        raise InputError(f"expected a new file for --sheet, but {sheet} exists: remove it")
    check_target(sheet)
    if info.config.in_chans != 3:
        raise InputError(
            f"expected weights for RGB with --sheet, which shows the images, but {info.name}"
            f" takes {info.config.in_chans} channels: leave out --sheet"
        )
    for image in images:
        if not isinstance(image, str | os.PathLike):
            raise InputError(f"expected paths of images with --sheet, got {image!r:.80}")


def _draw_sheet(path: Path, cells: Sequence[tuple[str, str]], reader: ImageReader) -> None:
    from PIL import Image, ImageDraw

    line, rows = _SIDE + 3 * _GAP, -(-len(cells) // _COLUMNS)
    width = min(len(cells), _COLUMNS) * (_SIDE + _GAP) + _GAP
    sheet = Image.new("RGB", (width, rows * line + _GAP), "white")
    for number, (name, text) in enumerate(cells):
        left, top = number % _COLUMNS * (_SIDE + _GAP) + _GAP, number // _COLUMNS * line + _GAP
        thumbnail = reader.open(name).rgb()
        thumbnail.thumbnail((_SIDE, _SIDE))
        sheet.paste(thumbnail, (left, top))
        ImageDraw.Draw(sheet).text((left, top + _SIDE + _GAP // 2), text, "black")
    with atomic_write(path) as temporary:
        sheet.save(temporary, "PNG")
