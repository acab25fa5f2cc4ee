"""Draw the operations of timm's policies and of torchvision's affine maps without computing them.

The transforms of timm and torchvision run on an `ImageRecorder` in place of an image. So every
number is drawn as they draw it, and is recorded for `tresnet.ops.render`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling, fromarray
from timm.data.auto_augment import AugmentOp, AugMixAugment, AutoAugment, RandAugment
from timm.data.transforms_factory import create_transform

from tresnet.errors import ConfigError
from tresnet.ops.render.rows import Op
from tresnet.settings import Sides


class ImageRecorder(Image):
    """Stand-in for an RGB image; `layers` has the operation and arguments of each call."""

    def __init__(self, size: tuple[int, int]) -> None:
        """Store the size (height, width)."""
        super().__init__()
        self._mode, self._size = "RGB", size[::-1]  # as Pillow's plugins set them
        self.layers: list[tuple[float, ...]] = []

    def transform(  # type: ignore[override]
        self, size: Any, method: Any, data: Any, resample: int = 0, *, fillcolor: Any, **_: Any
    ) -> "ImageRecorder":
        """Record an affine map with its fill colour."""
        self.layers.append((Op.AFFINE, *data, *fillcolor, resample == Resampling.BICUBIC))
        return self

    def rotate(  # type: ignore[override]
        self, angle: float, resample: Any, *, fillcolor: Any
    ) -> Image:
        """Record a rotation; with a centre, Pillow has no special case for right angles."""
        center = self.size[0] / 2, self.size[1] / 2
        return super().rotate(angle, resample, center=center, fillcolor=fillcolor)

    def filter(self, filter: Any) -> "ImageRecorder":
        """Record a Gaussian blur."""
        self.layers.append((Op.BLUR, filter.radius))
        return self


class _Recorded:
    """Stand-in for timm's function of a policy's operation; it takes an `ImageRecorder`."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, image: ImageRecorder, *args: Any, **options: Any) -> ImageRecorder:
        name, value = self._function.__name__, args[0] if args else 0
        match name:
            case "auto_contrast" | "equalize" | "invert":
                image.layers.append((Op[name.replace("_", "").upper()],))
            case "color" | "contrast" | "brightness" | "sharpness" | "solarize":
                image.layers.append((Op[name.upper()], value))
            case "desaturate":
                image.layers.append((Op.COLOR, min(1.0, max(0.0, 1.0 - value))))
            case "posterize":
                image.layers.append((Op.POSTERIZE, min(max(value, 0), 8)))
            case "solarize_add":
                image.layers.append((Op.SOLARIZE_ADD, value, 128))
            case _:  # affine maps and blurs
                self._function(image, *args, **options)
        return image


class Policy:
    """Policy of timm: `transform` changes an `ImageRecorder`; if `mixes`, it is AugMix, for images.

    `count` is the largest number of operations that it draws for a sample.
    """

    def __init__(self, name: str, size: Sides, interpolation: str) -> None:
        """Build the policy; an unknown name raises ConfigError."""
        try:
            _, transform, _ = create_transform(
                size,
                is_training=True,
                color_jitter=None,  # type: ignore[arg-type]  no color jitter
                auto_augment=name,
                interpolation=interpolation,
                normalize=False,
                separate=True,
            )
        except (AssertionError, KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                f"expected auto_augment to be a policy of timm, such as 'original', '3a' or "
                f"'rand-m9-mstd0.5', got {name!r}"
            ) from error
        (self.transform,) = transform.transforms  # type: ignore[union-attr]
        self.mixes, self.count = isinstance(self.transform, AugMixAugment), 0
        if isinstance(self.transform, RandAugment):
            self._record(self.transform.ops)
            self.count = self.transform.num_layers
        elif isinstance(self.transform, AutoAugment):
            for ops in self.transform.policy:
                self._record(ops)
                self.count = max(self.count, len(ops))

    def mixed(self, image: torch.Tensor) -> torch.Tensor:
        """Apply AugMix, which mixes several images of a sample, to an image (3, H, W), uint8.

        The result is (H, W, 3).
        """
        mixed: Any = self.transform(fromarray(image.permute(1, 2, 0).numpy()))
        return torch.from_numpy(np.array(mixed))

    def _record(self, ops: Sequence[AugmentOp]) -> None:
        for op in ops:
            op.aug_fn = _Recorded(op.aug_fn)
