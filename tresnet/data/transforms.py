"""Transform images to RGB tensors in [0, 1], without normalisation by mean and deviation.

`train_transform` combines transforms of timm and torchvision, which draw from the global random
generators. The loader seeds these generators for each sample. `eval_transform` gives timm's
results. Both transforms can return uint8 images, which take a quarter of float32's memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from tresnet.data.decoding import Box, EncodedImage, crop_of
from tresnet.errors import ConfigError
from tresnet.models.zoo import DEFAULT_INPUT_SIZE, default_crop_pct
from tresnet.settings import EvalTransform, Sides, sides
from tresnet.settings.fields import (
    Ascending,
    Fraction,
    FractionAbove0,
    Positive,
    PositiveOrZero,
    Settings,
    check,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Function from an image to a tensor. A PIL image must be in RGB.
Transform = Callable[["Image | EncodedImage"], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Augment(Settings):
    """Augmentation of training images, applied in the order of the fields."""

    random_crop: bool = True
    """Crop a random part of the image and resize the crop. If false, resize the complete image."""
    crop_scale: Annotated[tuple[FractionAbove0, FractionAbove0], Ascending] = (0.08, 1.0)
    """Smallest and largest fraction of the image's area in a random crop."""
    crop_ratio: Annotated[tuple[Positive, Positive], Ascending] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of a random crop."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    affine_degrees: PositiveOrZero = 0.0
    """Largest random rotation in degrees, clockwise or anticlockwise."""
    affine_translate: Fraction = 0.0
    """Largest random shift, as a fraction of the image's width and height."""
    affine_scale: Annotated[tuple[Positive, Positive], Ascending] = (1.0, 1.0)
    """Smallest and largest factor of the random zoom."""
    affine_shear: PositiveOrZero = 0.0
    """Largest random horizontal shear in degrees, to the left or right."""
    auto_augment: str | None = None
    """Augmentation policy of timm, such as original, v0 or rand-m9-mstd0.5. None: no policy."""
    cutout_prob: Fraction = 0.0
    """Probability that cutout blackens a random rectangle of the image."""
    cutout_area: Annotated[tuple[FractionAbove0, FractionAbove0], Ascending] = (0.25, 0.25)
    """Smallest and largest fraction of the image's area that cutout blackens."""
    cutout_min_aspect: FractionAbove0 = 1.0
    """Smallest height / width of cutout's rectangle; the largest is its inverse. 1: a square."""


def train_transform(
    cfg: Augment,
    size: Sides = 224,
    interpolation: str = "bilinear",
    *,
    dtype: torch.dtype = torch.float32,
) -> Transform:
    """Build the random training transform of `cfg` from transforms of timm and torchvision.

    The transform maps an `EncodedImage`, or a PIL image in RGB, to a tensor (3, height, width):
    torch.float32 in [0, 1], or torch.uint8. The transform can be pickled. It uses Python's, NumPy's
    and PyTorch's global CPU generators, which the loader seeds for each sample. Affine transforms
    fill empty pixels with black. Policies (`auto_augment`) fill them with ImageNet's mean colour.
    Cutout's rectangle does not cross the image's border, unlike that of arXiv 1708.04552. A value
    out of range, or an unknown policy or dtype, raises ConfigError.
    """
    from timm.data.random_erasing import RandomErasing
    from torchvision import transforms

    if min(sides(size)) < 1:
        raise ConfigError(f"expected a size of at least 1 pixel, got {size}")
    check(cfg)
    steps: list[Any] = [_Crop(cfg, size, interpolation)]
    on_pil = [*_affine(cfg), *_policy(cfg, size, interpolation)]
    if on_pil:
        steps += [_to_pil, *on_pil, np.array, torch.from_numpy]
    steps += [methodcaller("permute", 2, 0, 1), *_to_dtype(dtype)]
    if cfg.cutout_prob:
        low, high = cfg.cutout_area
        steps.append(
            RandomErasing(
                cfg.cutout_prob,
                min_area=low,
                max_area=high,
                min_aspect=cfg.cutout_min_aspect,
                mode="const",  # other modes fill with noise that may leave [0, 1]
                device="cpu",
            )
        )
    return transforms.Compose(steps)


class _Crop:
    """Random crop that is decoded, resized, and flipped horizontally at random.

    timm draws the crop, and torch's generator draws the flip, as in torchvision. Bilinear resizing
    is torch's: it is three to four times as fast as Pillow's, and values differ by at most 1.
    Bicubic resizing is Pillow's, because torch's bicubic values differ from Pillow's by up to 6.
    """

    def __init__(self, cfg: Augment, size: Sides, interpolation: str) -> None:
        from timm.data.transforms import RandomResizedCropAndInterpolation

        self._size = sides(size)
        self._hflip = cfg.hflip
        self._random = cfg.random_crop
        self._timm = RandomResizedCropAndInterpolation(
            size, cfg.crop_scale, cfg.crop_ratio, interpolation
        )

    def __call__(self, image: "Image | EncodedImage") -> torch.Tensor:
        box, flip = self.draw(*image.size)
        crop = image.crop(box) if isinstance(image, EncodedImage) else crop_of(image, box)
        crop = self.resize(crop)
        return crop.flip(1) if flip else crop

    def draw(self, width: int, height: int) -> tuple[Box, bool]:
        box: Box = (0, 0, height, width)
        if self._random:
            image: Any = torch.empty(height, width, device="meta")  # timm reads its size only
            crop = self._timm.get_params(image, self._timm.scale, self._timm.ratio)
            top, left, rows, columns = map(int, crop)
            # timm may draw an empty crop of a tiny image, so the crop gets at least one pixel.
            box = (min(top, height - 1), min(left, width - 1), max(rows, 1), max(columns, 1))
        return box, bool(self._hflip) and torch.rand(1).item() < self._hflip

    def resize(self, crop: torch.Tensor) -> torch.Tensor:
        if getattr(self._timm.interpolation, "value", None) == "bicubic":
            from PIL.Image import Resampling

            height, width = self._size
            resized = _to_pil(crop).resize((width, height), Resampling.BICUBIC)
            return torch.from_numpy(np.array(resized))
        if crop.numel() == 3:  # from one pixel, `interpolate` would return another layout
            crop = crop.expand(2, 2, 3).contiguous()
        planes = crop.permute(2, 0, 1)[None]
        resized = interpolate(planes, self._size, mode="bilinear", antialias=True)
        return resized[0].permute(1, 2, 0)


def _to_pil(image: torch.Tensor) -> "Image":
    from PIL import Image

    return Image.fromarray(image.numpy())


def _affine(cfg: Augment) -> list[Any]:
    from torchvision import transforms

    if not (cfg.affine_degrees or cfg.affine_translate or cfg.affine_shear) and (
        cfg.affine_scale == (1, 1)
    ):
        return []
    return [
        transforms.RandomAffine(
            cfg.affine_degrees,
            translate=(cfg.affine_translate, cfg.affine_translate),
            scale=cfg.affine_scale,
            shear=cfg.affine_shear,
            interpolation=transforms.InterpolationMode.BILINEAR,
        )
    ]


def eval_transform(cfg: EvalTransform, *, dtype: torch.dtype = torch.float32) -> Transform:
    """Build timm's evaluation transform for `cfg`, without its normalisation by mean and deviation.

    Input and output are as in `train_transform`. A field of `cfg` that is None gets its default:
    224 pixels, a centre crop, the zoo's `default_crop_pct`, bilinear interpolation. A value out of
    range, or an unknown dtype, raises `ConfigError`.
    """
    check(cfg)
    size, mode = cfg.input_size or DEFAULT_INPUT_SIZE, cfg.crop_mode or "center"
    pct = cfg.crop_pct or default_crop_pct(size, mode)
    filter_ = cfg.interpolation or "bilinear"
    return _ResizeAndCrop(sides(size), mode, pct, filter_, _to_dtype(dtype))


@dataclass(frozen=True)
class _ResizeAndCrop:
    """Evaluation transform of timm, without torchvision, whose import takes two seconds."""

    size: tuple[int, int]
    mode: str
    crop_pct: float
    interpolation: str
    conversions: list[Callable[[torch.Tensor], torch.Tensor]]

    def __call__(self, image: "Image | EncodedImage") -> torch.Tensor:
        from PIL.Image import Resampling

        image = image.rgb() if isinstance(image, EncodedImage) else image
        image = image.resize(self.resized(*image.size), Resampling[self.interpolation.upper()])
        (left, right), (top, bottom) = map(_middle, image.size, self.size[::-1])
        image = image.crop((left, top, right, bottom))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        for convert in self.conversions:
            pixels = convert(pixels)
        return pixels

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized before the crop."""
        rows, columns = (math.floor(side / self.crop_pct) for side in self.size)
        if self.mode == "squash":
            return columns, rows
        if self.mode == "center" and rows == columns:
            short = min(width, height)
            return int(rows * width / short), int(rows * height / short)
        choose = max if self.mode == "border" else min
        ratio = choose(height / rows, width / columns)
        return max(1, round(width / ratio)), max(1, round(height / ratio))


def _middle(length: int, size: int) -> tuple[int, int]:
    """Return begin and end of a centred crop of `size` pixels; begin < 0 if `size` > `length`."""
    begin = round((length - size) / 2) if length >= size else -((size - length) // 2)
    return begin, begin + size


def _policy(cfg: Augment, size: Sides, interpolation: str) -> list[Any]:
    from timm.data.transforms_factory import create_transform

    if cfg.auto_augment is None:
        return []
    try:
        _, policy, _ = create_transform(
            size,
            is_training=True,
            color_jitter=None,  # type: ignore[arg-type]  no color jitter
            auto_augment=cfg.auto_augment,
            interpolation=interpolation,
            normalize=False,
            separate=True,
        )
    except (AssertionError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"expected auto_augment to be a policy of timm, such as 'original', '3a' or "
            f"'rand-m9-mstd0.5', got {cfg.auto_augment!r}"
        ) from error
    return [policy]


def _to_dtype(dtype: torch.dtype) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    if dtype == torch.uint8:
        return []
    if dtype == torch.float32:
        return [_to_unit]
    raise ConfigError(f"expected dtype torch.float32 or torch.uint8, got {dtype}")


def _to_unit(pixels: torch.Tensor) -> torch.Tensor:
    return pixels / 255
