"""From an image to the tensor TResNet takes: RGB in [0, 1], no mean/std normalisation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from tresnet.data.pictures import Box, Picture, crop_of
from tresnet.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

# A PIL image has to be in RGB.
Transform = Callable[["Image | Picture"], torch.Tensor]


@dataclass(frozen=True)
class Augment:
    """How training images are varied, in this order."""

    random_crop: bool = True
    """Crop a random part and resize it, instead of squashing the whole image."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area that a random crop covers: least, most."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width / height of a random crop: least, most."""
    hflip: float = 0.5
    """Probability of a mirror image."""
    affine_degrees: float = 0.0
    """Largest random rotation either way."""
    affine_translate: float = 0.0
    """Largest random shift, as a share of the image's side."""
    affine_scale: tuple[float, float] = (1.0, 1.0)
    """Random zoom: least, most."""
    affine_shear: float = 0.0
    """Largest random shear in degrees either way."""
    auto_augment: str | None = None
    """Policy in timm's notation, such as original, v0 or rand-m9-mstd0.5. None: none."""
    cutout_prob: float = 0.0
    """Probability that a random part is blackened."""
    cutout_area: tuple[float, float] = (0.25, 0.25)
    """Share of the area that cutout blackens: least, most."""
    cutout_min_aspect: float = 1.0
    """Least height / width of that part, with its inverse the most. 1: a square."""

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name in ("hflip", "cutout_prob", "affine_translate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"expected {name} in [0, 1], got {getattr(self, name)}")
        for name, most in {
            "crop_scale": 1.0,
            "cutout_area": 1.0,
            "crop_ratio": math.inf,
            "affine_scale": math.inf,
        }.items():
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                limit = "" if most == math.inf else f" <= {most:g}"
                raise ConfigError(
                    f"expected {name} as 0 < smallest <= largest{limit}, got {low}, {high}"
                )
        if not 0 < self.cutout_min_aspect <= 1:
            raise ConfigError(f"expected cutout_min_aspect in (0, 1], got {self.cutout_min_aspect}")
        if not (0 <= self.affine_degrees < math.inf and 0 <= self.affine_shear < math.inf):
            raise ConfigError(
                "expected affine_degrees and affine_shear of 0 or more, "
                f"got {self.affine_degrees} and {self.affine_shear}"
            )


@dataclass(frozen=True)
class EvalTransform:
    """How an image is brought to the size a model is tested at.

    Attributes:
        size: height and width of the result in pixels.
        crop_mode: "center" keeps the shape of things: the shorter side becomes size / crop_pct
            and the middle is cut out. "squash" makes both sides size / crop_pct.
        crop_pct: part of the resized image that is kept; None is 0.875 for "center" and 1 for
            "squash", that is, nothing is lost.
        interpolation: how pixels are resampled, with antialiasing.
    """

    size: int = 224
    crop_mode: str = "center"
    crop_pct: float | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.crop_mode not in ("center", "squash"):
            raise ConfigError(f"expected crop_mode 'center' or 'squash', got {self.crop_mode!r}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ConfigError(f"expected crop_pct in (0, 1], got {self.crop_pct}")


def train_transform(
    cfg: Augment,
    size: int = 224,
    interpolation: str = "bilinear",
    *,
    dtype: torch.dtype = torch.float32,
) -> Transform:
    """Build the random transform of `cfg` out of timm's and torchvision's parts.

    It draws from Python's, NumPy's and PyTorch's global CPU generators, which the loader seeds for
    each sample. What an affine change uncovers is black, what a policy uncovers ImageNet's mean
    colour. Cutout's paper lets squares cross the border or, as good, keeps them inside and cuts
    every other image: here it is the latter, with a probability.

    Args:
        cfg: what to change.
        size: height and width of the result in pixels.
        interpolation: "bilinear" or "bicubic".
        dtype: torch.float32 for values in [0, 1] or torch.uint8 for 0..255.

    Returns:
        A picklable function from a `Picture`, or a PIL image in RGB, to a tensor (3, size, size).

    Raises:
        ConfigError: a value is out of range, or the policy or the dtype unknown.
    """
    from timm.data.random_erasing import RandomErasing
    from torchvision import transforms

    _check_size(size)
    cfg.check()
    steps: list[Any] = [_Crop(cfg, size, interpolation)]
    on_pil = [*_affine(cfg), *_policy(cfg, size, interpolation)]
    if on_pil:
        steps += [_to_pil, *on_pil, np.array, torch.from_numpy]
    steps += [_channels_first, *_to_dtype(dtype)]
    if cfg.cutout_prob:
        low, high = cfg.cutout_area
        steps.append(
            RandomErasing(
                cfg.cutout_prob,
                min_area=low,
                max_area=high,
                min_aspect=cfg.cutout_min_aspect,
                mode="const",  # its other modes draw normal noise, which leaves [0, 1]
                device="cpu",
            )
        )
    return transforms.Compose(steps)


class _Crop:
    """Decode the part of an image that is cropped at random, resize it, mirror it at random.

    The boxes and mirrors are those that timm and torchvision draw. torch resizes bytes whose
    channels are innermost three to four times as fast as Pillow: bilinearly to within one of its
    values, bicubically to within six, so that this is left to Pillow.
    """

    def __init__(self, cfg: Augment, size: int, interpolation: str) -> None:
        from timm.data.transforms import RandomResizedCropAndInterpolation

        self._size = [size, size]
        self._hflip = cfg.hflip
        self._drawn = cfg.random_crop
        self._timm = RandomResizedCropAndInterpolation(
            size, cfg.crop_scale, cfg.crop_ratio, interpolation
        )

    def __call__(self, image: "Image | Picture") -> torch.Tensor:
        """(size, size, 3), uint8."""
        box, mirror = self.draw(*image.size)
        part = image.crop(box) if isinstance(image, Picture) else crop_of(image, box)
        part = self.resize(part)
        return part.flip(1) if mirror else part

    def draw(self, width: int, height: int) -> tuple[Box, bool]:
        """A box within an image of this size, and whether to mirror it."""
        box: Box = (0, 0, height, width)
        if self._drawn:
            sized: Any = torch.empty(height, width, device="meta")
            box = self._timm.get_params(sized, self._timm.scale, self._timm.ratio)
        return box, bool(self._hflip) and torch.rand(1).item() < self._hflip

    def resize(self, part: torch.Tensor) -> torch.Tensor:
        """(size, size, 3) of (height, width, 3), uint8."""
        if getattr(self._timm.interpolation, "value", None) == "bicubic":
            from PIL.Image import Resampling

            return torch.from_numpy(np.array(_to_pil(part).resize(self._size, Resampling.BICUBIC)))
        planes = part.permute(2, 0, 1)[None]
        resized = interpolate(planes, self._size, mode="bilinear", antialias=True)
        return resized[0].permute(1, 2, 0)


def _channels_first(image: torch.Tensor) -> torch.Tensor:
    """(3, H, W), as a view of (H, W, 3)."""
    return image.permute(2, 0, 1)


def _to_pil(image: torch.Tensor) -> "Image":
    from PIL import Image

    return Image.fromarray(image.numpy())


def _affine(cfg: Augment) -> list[Any]:
    """The random affine change of a PIL image, if there is one."""
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
    """Build the fixed transform of `cfg`: timm's own, without mean/std.

    Args:
        cfg: size and crop.
        dtype: torch.float32 for values in [0, 1] or torch.uint8 for 0..255.

    Returns:
        A picklable function from a `Picture`, or a PIL image in RGB, to a tensor (3, size, size).
    """
    from timm.data.transforms_factory import create_transform
    from torchvision import transforms

    crop_pct = cfg.crop_pct or (0.875 if cfg.crop_mode == "center" else 1.0)
    resize_and_crop = create_transform(
        cfg.size,
        is_training=False,
        interpolation=cfg.interpolation,
        crop_pct=crop_pct,
        crop_mode=cfg.crop_mode,
        normalize=False,
    )
    return transforms.Compose([_decoded, resize_and_crop, *_to_dtype(dtype)])


def _decoded(image: "Image | Picture") -> "Image":
    return image.rgb() if isinstance(image, Picture) else image


def _policy(cfg: Augment, size: int, interpolation: str) -> list[Any]:
    """Changes of a PIL image by a policy of timm's, if there is one."""
    from timm.data.transforms_factory import create_transform

    if cfg.auto_augment is None:
        return []
    try:
        _, policy, _ = create_transform(
            size,
            is_training=True,
            color_jitter=None,  # type: ignore[arg-type]  timm's way to leave it out
            auto_augment=cfg.auto_augment,
            interpolation=interpolation,
            normalize=False,
            separate=True,
        )
    except (AssertionError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"expected auto_augment to be a policy timm knows, such as 'original', '3a' or "
            f"'rand-m9-mstd0.5', got {cfg.auto_augment!r}"
        ) from error
    return [policy]


def _to_dtype(dtype: torch.dtype) -> list[Any]:
    """Return the step from a uint8 tensor to `dtype`: none, or division by 255."""
    from torchvision import transforms

    if dtype == torch.uint8:
        return []
    if dtype == torch.float32:
        return [transforms.ConvertImageDtype(dtype)]
    raise ConfigError(f"expected dtype torch.float32 or torch.uint8, got {dtype}")


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(f"expected a size of at least 1 pixel, got {size}")
