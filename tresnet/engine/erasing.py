"""Random erasing (arXiv 1708.04896) and cutout on the step's device, with timm's rectangles."""

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from tresnet.data.seeding import mix_seed
from tresnet.settings import Augment

_TRIES = 10  # as in timm, until a rectangle fits
# timm fills with normal noise in images that are normalised by ImageNet's mean and deviation.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Rectangle = tuple[int, int, int, int]  # top, left, bottom, right in pixels


class RandomErasing(NamedTuple):
    """Random erasing of batches, which depends on a seed, and in its noise on the device.

    Attributes:
        prob: Probability that an image is erased.
        area: Smallest and largest erased fraction of an image.
        min_aspect: Smallest height / width of a rectangle; the largest is its inverse.
        mode: Fill, as in `Augment.remode`.
        most: Largest number of rectangles of an image.
    """

    prob: float
    area: tuple[float, float] = (0.02, 1 / 3)
    min_aspect: float = 0.3
    mode: str = "const"
    most: int = 1

    def __call__(self, images: Tensor, seed: int) -> Tensor:
        """Return images (N, 3, H, W) with erased rectangles, in the dtype and layout of `images`.

        `images` are uint8, or floats in [0, 1]. Noise outside of this range is clamped. Images of
        other channels are normalised floats, whose fill is 0 or noise of mean 0 and deviation 1.
        """
        count, _, height, width = images.shape
        draws = random.Random(seed)
        drawn = [self._rectangles(draws, height, width) for _ in range(count)]
        generator = torch.Generator(images.device).manual_seed(mix_seed(seed, 1))
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        # An image's next rectangle erases what the one before left there.
        for number in range(max(map(len, drawn), default=0)):
            boxes = [each[number] if number < len(each) else (0, 0, 0, 0) for each in drawn]
            sides = torch.tensor(boxes).to(images.device, non_blocking=True)[:, :, None, None, None]
            top, left, bottom, right = sides.unbind(1)  # (N, 1, 1, 1)
            erased = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
            images = torch.where(erased, self._fill(images, generator), images)
        return images

    def _fill(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if self.mode == "const":
            return images.new_zeros(())
        noise = images if self.mode == "pixel" else images[:, :, :1, :1]
        noise = torch.empty_like(noise, dtype=torch.float32).normal_(generator=generator)
        mean, std = (
            torch.tensor(values).to(images.device, non_blocking=True).view(3, 1, 1)
            for values in (_MEAN, _STD)
        )
        if images.shape[1] != 3:  # images of other channels are normalised, as timm's are
            return noise.to(images.dtype)
        colors = (mean + std * noise).clamp(0, 1)
        if images.dtype == torch.uint8:
            colors = (255 * colors).round()
        return colors.to(images.dtype)

    def _rectangles(self, draws: random.Random, height: int, width: int) -> list[Rectangle]:
        """Draw the rectangles to erase in an image, in the order of timm's draws."""
        if draws.random() > self.prob:
            return []
        count = 1 if self.most == 1 else draws.randint(1, self.most)
        aspects = math.log(self.min_aspect), math.log(1 / self.min_aspect)
        found: list[Rectangle] = []
        for _ in range(count):
            for _ in range(_TRIES):
                area = draws.uniform(*self.area) * height * width / count
                aspect = math.exp(draws.uniform(*aspects))
                tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if tall < height and wide < width:
                    top, left = draws.randint(0, height - tall), draws.randint(0, width - wide)
                    found.append((top, left, top + tall, left + wide))
                    break
        return found


def erasings(cfg: Augment) -> list[RandomErasing]:
    """Return cutout and random erasing, each if `cfg` has it.

    Cutout's rectangle does not cross the image's border, unlike that of arXiv 1708.04552.
    """
    cutout = RandomErasing(cfg.cutout_prob, cfg.cutout_area, cfg.cutout_min_aspect)
    erasing = RandomErasing(cfg.reprob, mode=cfg.remode, most=cfg.recount)
    return [each for each in (cutout, erasing) if each.prob]
