"""From an image to the tensor TResNet takes: RGB in [0, 1], no mean/std normalisation."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tresnet.data.pictures import Box, Picture, crop_of
from tresnet.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

# A PIL image has to be in RGB.
Transform = Callable[["Image | Picture"], torch.Tensor]


@dataclass(frozen=True)
class TrainAugment:
    """Random changes to a training image, in the order they are applied.

    Attributes:
        size: height and width of the result in pixels.
        random_crop: crop a random part and resize it; else squash the whole image to `size`.
        crop_scale: smallest and largest cropped part, as a fraction of the image's area.
        crop_ratio: smallest and largest width/height of the crop.
        interpolation: "random" draws bilinear or bicubic for each image.
        hflip: probability of a mirror image.
        affine_degrees: largest rotation either way.
        affine_translate: largest shift, as a fraction of the size.
        affine_scale: smallest and largest zoom.
        affine_shear: largest shear in degrees either way. What an affine change uncovers is black.
        auto_augment: timm's policy, such as "original" (AutoAugment), "rand-m9-mstd0.5"
            (RandAugment) or "3a". What a policy uncovers is ImageNet's mean colour.
        cutout_prob: probability of blackening one square. Cutout's paper lets squares cross the
            border or, as good, keeps them inside and cuts every other image: this is the latter.
        cutout_area: smallest and largest part blackened, as a fraction of the area.
        cutout_min_aspect: smallest height/width of that part, with 1/x the largest; 1 is a square.
            Area (0.02, 0.33) with aspect 0.3 makes it Random Erasing.
    """

    size: int = 224
    random_crop: bool = True
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic", "random"] = "bilinear"
    hflip: float = 0.5
    affine_degrees: float = 0.0
    affine_translate: float = 0.0
    affine_scale: tuple[float, float] = (1.0, 1.0)
    affine_shear: float = 0.0
    auto_augment: str | None = "original"
    cutout_prob: float = 0.5
    cutout_area: tuple[float, float] = (0.25, 0.25)
    cutout_min_aspect: float = 1.0

    def __post_init__(self) -> None:
        _check_size(self.size)
        for name in ("hflip", "cutout_prob", "affine_translate"):
            _check_fraction(name, getattr(self, name))
        for name in ("crop_scale", "cutout_area"):
            _check_range(name, getattr(self, name), largest=1.0)
        for name in ("crop_ratio", "affine_scale"):
            _check_range(name, getattr(self, name))
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
    crop_mode: Literal["center", "squash"] = "center"
    crop_pct: float | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.crop_mode not in ("center", "squash"):
            raise ConfigError(f"expected crop_mode 'center' or 'squash', got {self.crop_mode!r}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ConfigError(f"expected crop_pct in (0, 1], got {self.crop_pct}")

    @property
    def resolved_crop_pct(self) -> float:
        """`crop_pct`, or what None stands for in this crop mode."""
        if self.crop_pct is not None:
            return self.crop_pct
        return 0.875 if self.crop_mode == "center" else 1.0


def train_transform(cfg: TrainAugment, *, dtype: torch.dtype = torch.float32) -> Transform:
    """Build the random transform of `cfg` out of timm's and torchvision's parts.

    It draws from Python's, NumPy's and PyTorch's global CPU generators, which the loader seeds for
    each sample.

    Args:
        cfg: what to change.
        dtype: torch.float32 for values in [0, 1] or torch.uint8 for 0..255.

    Returns:
        A picklable function from a `Picture`, or a PIL image in RGB, to a tensor (3, size, size).

    Raises:
        ConfigError: the policy or the dtype is unknown.
    """
    from timm.data.random_erasing import RandomErasing
    from torchvision import transforms

    steps: list[Any] = [_Crop(cfg)]
    on_pil = [*_affine(cfg), *_policy(cfg)]
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

    The boxes and mirrors are those that timm and torchvision draw. torchvision resizes bytes whose
    channels are innermost three to four times as fast as Pillow: bilinearly to within one of its
    values, bicubically to within six, so that this is left to Pillow.
    """

    def __init__(self, cfg: TrainAugment) -> None:
        from timm.data.transforms import RandomResizedCropAndInterpolation

        self._size = [cfg.size, cfg.size]
        self._hflip = cfg.hflip
        self._drawn = cfg.random_crop
        mode = cfg.interpolation
        if mode == "random" and not cfg.random_crop:
            mode = "bilinear"
        self._timm = RandomResizedCropAndInterpolation(
            cfg.size, cfg.crop_scale, cfg.crop_ratio, mode
        )

    def __call__(self, image: "Image | Picture") -> torch.Tensor:
        """(size, size, 3), uint8."""
        box, mode = self._draw(image.image if isinstance(image, Picture) else image)
        mirror = bool(self._hflip) and torch.rand(1).item() < self._hflip
        part = image.crop(box) if isinstance(image, Picture) else crop_of(image, box)
        part = self._resize(part, mode)
        return part.flip(1) if mirror else part

    def _resize(self, part: torch.Tensor, mode: Any) -> torch.Tensor:
        from torchvision.transforms.v2 import InterpolationMode, functional

        if mode == InterpolationMode.BICUBIC:
            from PIL.Image import Resampling

            return torch.from_numpy(np.array(_to_pil(part).resize(self._size, Resampling.BICUBIC)))
        planes = functional.resize(part.permute(2, 0, 1), self._size, mode, antialias=True)
        return planes.permute(1, 2, 0)

    def _draw(self, image: "Image") -> tuple[Box, Any]:
        """The box to keep, and how to resize it."""
        crop = self._timm
        box = (0, 0, image.height, image.width)
        if self._drawn:
            box = crop.get_params(image, crop.scale, crop.ratio)
        choices = crop.interpolation
        return box, random.choice(choices) if isinstance(choices, tuple | list) else choices


def _channels_first(image: torch.Tensor) -> torch.Tensor:
    """(3, H, W), as a view of (H, W, 3)."""
    return image.permute(2, 0, 1)


def _to_pil(image: torch.Tensor) -> "Image":
    from PIL import Image

    return Image.fromarray(image.numpy())


def _affine(cfg: TrainAugment) -> list[Any]:
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

    resize_and_crop = create_transform(
        cfg.size,
        is_training=False,
        interpolation=cfg.interpolation,
        crop_pct=cfg.resolved_crop_pct,
        crop_mode=cfg.crop_mode,
        normalize=False,
    )
    return transforms.Compose([_decoded, resize_and_crop, *_to_dtype(dtype)])


def _decoded(image: "Image | Picture") -> "Image":
    return image.rgb() if isinstance(image, Picture) else image


def _policy(cfg: TrainAugment) -> list[Any]:
    """Changes of a PIL image by a policy of timm's, if there is one."""
    from timm.data.transforms_factory import create_transform

    if cfg.auto_augment is None:
        return []
    try:
        _, policy, _ = create_transform(
            cfg.size,
            is_training=True,
            color_jitter=None,  # type: ignore[arg-type]  timm's way to leave it out
            auto_augment=cfg.auto_augment,
            interpolation=cfg.interpolation,
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


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"expected {name} in [0, 1], got {value}")


def _check_range(name: str, pair: tuple[float, float], largest: float = float("inf")) -> None:
    low, high = pair
    if not 0 < low <= high <= largest:
        limit = "" if largest == float("inf") else f" <= {largest:g}"
        raise ConfigError(f"expected {name} as 0 < smallest <= largest{limit}, got {low}, {high}")
