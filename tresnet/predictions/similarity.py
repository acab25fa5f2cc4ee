"""Rank images by their similarity to an image, and draw the ranking."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import functional

from tresnet.checkpoints.describe import open_checkpoint
from tresnet.data.folder import open_image
from tresnet.errors import InputError
from tresnet.predictions.pictures import Source
from tresnet.predictions.predictor import open_torch
from tresnet.predictions.reader import Bad, outputs, raise_error
from tresnet.settings import Build, InferenceCompute
from tresnet.steps.compiled import Say, log
from tresnet.writing import atomic_write

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
) -> list[Similar]:
    """Return `images` by decreasing similarity to `image`: the cosine of the pooled features.

    `tresnet.predict` says what images may be; `Predictor` explains the options and their errors.
    `bad` receives the errors of `images`, which are then left out. An unreadable `image` is raised.
    """
    parts = build or Build(), compute or InferenceCompute()
    backend = open_torch(open_checkpoint(weights), device, *parts, say, features=True)
    options = backend.images, batch_size, max_image_pixels
    wanted = [row for _, _, rows in outputs(image, *options, raise_error) for row in rows]
    if len(wanted) != 1:
        raise InputError(f"expected one image to compare with, got {len(wanted)}: {image!r:.80}")
    unit = functional.normalize(wanted[0].double(), dim=0)
    ranking = []
    for names, _, features in outputs(images, *options, bad):
        cosines = functional.normalize(features.double(), dim=1) @ unit
        ranking += map(Similar, names, cosines.clamp(-1, 1).tolist())
    return sorted(ranking, key=lambda one: -one.similarity)


def draw_sheet(path: Path, image: str, ranking: Sequence[Similar], max_pixels: int | None) -> None:
    """Write a PNG of thumbnails: the image, then those of the ranking with their similarity."""
    from PIL import Image, ImageDraw

    cells = [(image, "image"), *((name, f"{cosine:.4f}") for name, cosine in ranking)]
    line, rows = _SIDE + 3 * _GAP, -(-len(cells) // _COLUMNS)
    width = min(len(cells), _COLUMNS) * (_SIDE + _GAP) + _GAP
    sheet = Image.new("RGB", (width, rows * line + _GAP), "white")
    for number, (name, text) in enumerate(cells):
        left, top = number % _COLUMNS * (_SIDE + _GAP) + _GAP, number // _COLUMNS * line + _GAP
        thumbnail = open_image(name, max_pixels).rgb()
        thumbnail.thumbnail((_SIDE, _SIDE))
        sheet.paste(thumbnail, (left, top))
        ImageDraw.Draw(sheet).text((left, top + _SIDE + _GAP // 2), text, "black")
    with atomic_write(path) as temporary:
        sheet.save(temporary, "PNG")
