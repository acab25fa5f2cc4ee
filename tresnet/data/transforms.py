"""Draw how images are cropped, resized and augmented, and decode the crops alone.

`train_sampler` draws by transforms of timm and torchvision, which use the global random generators.
The loader seeds these generators for each sample. `eval_sampler` draws nothing. A sample's pixels
are computed later, by `tresnet.ops.render` (see `tresnet.data.crops`).
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tresnet.data.crops import RenderSpec, Sample
from tresnet.data.decoding import Box, EncodedImage, crop_of
from tresnet.errors import ConfigError
from tresnet.models.zoo import DEFAULT_INPUT_SIZE, default_crop_pct
from tresnet.ops.render.rows import make_row
from tresnet.settings import CROP, Augment, EvalTransform, Sides, sides
from tresnet.settings.fields import check, option

if TYPE_CHECKING:
    from PIL.Image import Image

# Operations on RGB, and the values that turn them off.
_OFF = {
    "affine_degrees": 0, "affine_translate": 0, "affine_scale": (1, 1), "affine_shear": 0,
    "auto_augment": None,
}  # fmt: skip


def train_sampler(
    cfg: Augment, size: Sides = 224, interpolation: str = "bilinear", channels: int = 3
) -> Callable[["Image | EncodedImage"], Sample]:
    """Build the random training transform of `cfg`, which draws as timm and torchvision do.

    The sampler maps an `EncodedImage`, or a PIL image in RGB, to a `Sample`. It can be pickled. It
    uses Python's, NumPy's and PyTorch's global CPU generators, which the loader seeds for each
    sample. Affine transforms fill empty pixels with black. Policies (`auto_augment`) fill them with
    ImageNet's mean colour. The step's device blackens cutout's rectangle later. A value out of
    range, or an unknown policy, raises ConfigError.
    """
    if min(sides(size)) < 1:
        raise ConfigError(f"expected a size of at least 1 pixel, got {size}")
    check(cfg)
    wanted = {name: getattr(cfg, name) for name in _OFF if getattr(cfg, name) != _OFF[name]}
    if channels != 3 and wanted:
        off = (f"{option(name)} {_OFF[name]}" for name in wanted)
        raise ConfigError(
            f"expected only crops, flips, erasing and mixing for images of {channels} channels, got"
            f" {', '.join(f'{option(name)} {value}' for name, value in wanted.items())}, which are"
            f" for RGB: turn them off by {re.sub('[(),]', '', ' '.join(off))}"
        )
    affine = any(name.startswith("affine") for name in wanted)
    return _TrainSampler(cfg, size, interpolation, affine)


class _TrainSampler:
    """Random crop, flip, affine map and policy, drawn in this order.

    timm draws crops and policies. torch's generator draws flips and affine maps, as in
    torchvision.
    """

    def __init__(self, cfg: Augment, size: Sides, interpolation: str, affine: bool) -> None:
        from timm.data.transforms import RandomResizedCropAndInterpolation
        from torchvision import transforms

        from tresnet.data.policy import Policy

        self._cfg, self._spec = cfg, RenderSpec(sides(size), interpolation == "bicubic")
        self._timm = RandomResizedCropAndInterpolation(
            size, cfg.crop_scale, cfg.crop_ratio, interpolation
        )
        self._affine = self._policy = None
        if affine:
            self._affine = transforms.RandomAffine(
                cfg.affine_degrees,
                translate=(cfg.affine_translate, cfg.affine_translate),
                scale=cfg.affine_scale,
                shear=cfg.affine_shear,
                interpolation=transforms.InterpolationMode.BILINEAR,
            )
        if cfg.auto_augment is not None:
            self._policy = Policy(cfg.auto_augment, size, interpolation)
        self._layers = (self._affine is not None) + (self._policy.count if self._policy else 0)

    def __call__(self, image: "Image | EncodedImage") -> Sample:
        from tresnet.data.policy import ImageRecorder

        (top, left, height, width), flip = self.draw(*image.size)
        pixels = crop_of(image, (top, left, height, width))
        size, policy, recorder = self._spec.size, self._policy, ImageRecorder(self._spec.size)
        layers = recorder.layers
        if self._affine is not None:
            self._affine(recorder)
        if policy is not None and policy.mixes:
            row = make_row((height, width), size, flip=flip, layers=layers)
            pixels = policy.mixed(Sample(pixels, row, self._spec).image())
            (height, width), flip, layers = size, False, []
        elif policy is not None:
            policy.transform(recorder)
        row = make_row((height, width), size, flip=flip, layers=layers, count=self._layers)
        return Sample.of(pixels, row, self._spec)

    def draw(self, width: int, height: int) -> tuple[Box, bool]:
        cfg, box = self._cfg, (0, 0, height, width)
        if cfg.random_crop:
            image: Any = torch.empty(height, width, device="meta")  # timm reads its size only
            crop = self._timm.get_params(image, self._timm.scale, self._timm.ratio)
            top, left, rows, columns = map(int, crop)
            # timm may draw an empty crop of a tiny image, so the crop gets at least one pixel.
            box = (min(top, height - 1), min(left, width - 1), max(rows, 1), max(columns, 1))
        return box, bool(cfg.hflip) and torch.rand(1).item() < cfg.hflip


def eval_sampler(cfg: EvalTransform) -> Callable[["Image | EncodedImage"], Sample]:
    """Build timm's evaluation transform for `cfg`, as a sampler like that of `train_sampler`.

    A field of `cfg` that is None gets its default: 224 pixels, a centre crop, the zoo's
    `default_crop_pct`, bilinear interpolation. A value out of range raises `ConfigError`.
    """
    check(cfg)
    size, mode = cfg.input_size or DEFAULT_INPUT_SIZE, cfg.crop_mode or "center"
    pct = cfg.crop_pct or default_crop_pct(size, mode)
    return _EvalSampler(RenderSpec(sides(size), cfg.interpolation == "bicubic"), mode, pct)


def eval_transform(cfg: EvalTransform) -> Callable[["Image | EncodedImage"], torch.Tensor]:
    """Build timm's evaluation transform for `cfg`, without its normalisation by mean and deviation.

    It maps the images of `eval_sampler` to tensors (3, height, width), uint8. It can be pickled.
    """
    return partial(_image, eval_sampler(cfg))


def transform_of(cfg: Mapping[str, Any], size: Sides) -> Callable[[Any], torch.Tensor]:
    """Build the `eval_transform` that the `pretrained_cfg` of weights states, for a size."""
    size = size if isinstance(size, int) else (size[0], size[1])  # JSON gives a list
    return eval_transform(EvalTransform(input_size=size, **{key: cfg[key] for key in CROP}))


def _image(
    sampler: Callable[["Image | EncodedImage"], Sample], image: "Image | EncodedImage"
) -> torch.Tensor:
    return sampler(image).image()


class _EvalSampler(NamedTuple):
    """Evaluation transform of timm, without torchvision, whose import takes two seconds."""

    spec: RenderSpec
    mode: str
    crop_pct: float

    def __call__(self, image: "Image | EncodedImage") -> Sample:
        width, height = image.size
        columns, rows = self.resized(width, height)
        left, top = map(_middle, (columns, rows), self.spec.size[::-1])
        row = make_row((height, width), (rows, columns), (top, left))
        return Sample.of(crop_of(image, (0, 0, height, width)), row, self.spec)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized before the crop."""
        rows, columns = (math.floor(side / self.crop_pct) for side in self.spec.size)
        if self.mode == "squash":
            return columns, rows
        if self.mode == "center" and rows == columns:
            short = min(width, height)
            return int(rows * width / short), int(rows * height / short)
        choose = max if self.mode == "border" else min
        ratio = choose(height / rows, width / columns)
        return max(1, round(width / ratio)), max(1, round(height / ratio))


def _middle(length: int, size: int) -> int:
    """Return where a centred crop of `size` pixels begins; it is negative if `size` > `length`."""
    return round((length - size) / 2) if length >= size else -((size - length) // 2)
