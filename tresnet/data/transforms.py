"""From a PIL image in RGB to the tensor TResNet takes: RGB in [0, 1], no mean/std normalisation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tresnet.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Callable[["Image"], torch.Tensor]


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
        if self.affine_degrees < 0 or self.affine_shear < 0:
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


def digits_augment(size: int = 32) -> TrainAugment:
    """Changes that keep a handwritten digit what it is: small shifts, turns and zooms, no mirror."""
    return TrainAugment(
        size=size,
        random_crop=False,
        hflip=0.0,
        affine_degrees=10.0,
        affine_translate=0.1,
        affine_scale=(0.9, 1.1),
        affine_shear=5.0,
        auto_augment=None,
        cutout_prob=0.0,
    )


def train_transform(cfg: TrainAugment, *, dtype: torch.dtype = torch.float32) -> Transform:
    """Build the random transform of `cfg` out of timm's and torchvision's parts.

    It draws from Python's, NumPy's and PyTorch's global CPU generators, which the loader seeds for
    each sample.

    Args:
        cfg: what to change.
        dtype: torch.float32 for values in [0, 1] or torch.uint8 for 0..255.

    Returns:
        A picklable function from a PIL image in RGB to a tensor (3, size, size).

    Raises:
        ConfigError: the policy or the dtype is unknown.
    """
    from timm.data.random_erasing import RandomErasing
    from torchvision import transforms

    crop, policy, to_tensor = _timm_parts(cfg)
    steps: list[Any] = [crop]
    if not cfg.random_crop:
        steps = [_squash(cfg), transforms.RandomHorizontalFlip(cfg.hflip)]
    if cfg.affine_degrees or cfg.affine_translate or cfg.affine_shear or cfg.affine_scale != (1, 1):
        steps.append(
            transforms.RandomAffine(
                cfg.affine_degrees,
                translate=(cfg.affine_translate, cfg.affine_translate),
                scale=cfg.affine_scale,
                shear=cfg.affine_shear,
                interpolation=transforms.InterpolationMode.BILINEAR,
            )
        )
    steps += [policy, to_tensor, *_to_dtype(dtype)]
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


def eval_transform(cfg: EvalTransform, *, dtype: torch.dtype = torch.float32) -> Transform:
    """Build the fixed transform of `cfg`: timm's own, without mean/std.

    Args:
        cfg: size and crop.
        dtype: torch.float32 for values in [0, 1] or torch.uint8 for 0..255.

    Returns:
        A picklable function from a PIL image in RGB to a tensor (3, size, size).
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
    return transforms.Compose([resize_and_crop, *_to_dtype(dtype)])


def _timm_parts(cfg: TrainAugment) -> tuple[Any, Any, Any]:
    """Return timm's crop and mirror, its policy, and its conversion to a uint8 tensor."""
    from timm.data.transforms_factory import create_transform

    try:
        crop, policy, to_tensor = create_transform(
            cfg.size,
            is_training=True,
            scale=cfg.crop_scale,
            ratio=cfg.crop_ratio,
            hflip=cfg.hflip,
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
    return crop, policy, to_tensor


def _squash(cfg: TrainAugment) -> Any:
    from torchvision import transforms

    name = "bilinear" if cfg.interpolation == "random" else cfg.interpolation
    return transforms.Resize((cfg.size, cfg.size), transforms.InterpolationMode(name))


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
