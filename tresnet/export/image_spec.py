"""Images for an exported model: random images to check logits, and real images for its top-1."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tresnet.data.dataset import ImageDataset
from tresnet.data.labels import match
from tresnet.data.sources import fetch, open_split
from tresnet.data.transforms import transform_of
from tresnet.errors import ConfigError, DataError, InputError
from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import DataOptions, Input, Sides, sides

BATCH = 32


@dataclass(frozen=True)
class Images:
    """Shape, dtype and memory format of an exported model's images (N, channels, height, width)."""

    channels: int
    size: Sides  # in pixels; with `dynamic_size`, the size of the traced example
    multiple: int  # height and width must be multiples of this number
    dynamic_size: bool = False  # whether other heights and widths are accepted
    input: Input = "float"  # floats in [0, 1], or bytes
    channels_last: bool = False  # whether images must be in channels-last memory format
    # For other than three channels: type of the pixels, and of each channel the mean to subtract
    # and the deviation to divide by, before the exported model reads the image.
    pixel_dtype: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def least(self) -> int:
        """Smallest accepted height and width in pixels."""
        # n * `multiple` pixels become ceil(n / 4) at the last blur's input, which needs 2.
        # They become ceil(n / 8) in stage 4, where a dynamic size needs 2.
        return (9 if self.dynamic_size else 5) * self.multiple

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def check(self, x: Any) -> None:
        """Raise InputError unless `x` has the exported model's dtype, shape and memory format."""
        dtype = torch.uint8 if self.input == "uint8" else torch.float32
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != self.channels:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"expected images (N, {self.channels}, H, W), got {got}")
        if x.dtype != dtype:
            what = "bytes" if self.input == "uint8" else "floats in [0, 1]"
            raise InputError(f"expected {dtype} ({what}), got {x.dtype}: convert the images")
        if tuple(x.shape[2:]) != sides(self.size):  # the caller, `CompiledPackage`, has one size
            raise InputError(
                f"expected height and width {sides(self.size)}, got {tuple(x.shape[2:])}: resize"
            )
        if len(x) == 0:
            raise InputError("expected at least one image, got none")
        if not x.is_contiguous(memory_format=self.memory_format):
            raise InputError(
                f"expected images in {self.memory_format}, got strides {x.stride()} for shape "
                f"{tuple(x.shape)}: call x.contiguous(memory_format={self.memory_format})"
            )

    def prepare(self, images: Tensor) -> Tensor:
        """Convert uint8 images to the dtype and memory format of the exported model.

        Floats are normalised by `mean` and `std`.
        """
        if images.dtype != torch.uint8:
            mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            return ((images - mean) / std).contiguous(memory_format=self.memory_format)
        if self.input == "uint8":
            return images.contiguous(memory_format=self.memory_format)
        return unit_floats(images, memory_format=self.memory_format)

    def random(self, count: int, size: Sides | None = None) -> Tensor:
        """Return random uint8 images (count, channels, height, width); the seed is `count`."""
        generator = torch.Generator().manual_seed(count)
        shape = (count, self.channels, *sides(size or self.size))
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def samples(self) -> Iterator[Tensor]:
        """Yield random batches of 1 and 3 images; if `dynamic_size`, also images of other sizes."""
        yield self.random(1)
        yield self.random(3)
        if self.dynamic_size:
            side, (height, width) = self.multiple, sides(self.size)
            yield self.random(2, (height + side, width + 4 * side))
            yield self.random(1, (11 * side, 9 * side))  # its feature maps have odd sides


def open_labelled(
    data: str,
    split: str,
    model: TResNet,
    images: Images,
    classes: tuple[str, ...] | None,
    options: DataOptions,
) -> ImageDataset:
    """Open a data set as uint8 images; labels are indices of the model's outputs.

    DataError is raised if the data have classes that the model has not.
    """
    transform = transform_of(model.pretrained_cfg, images.size)
    dataset = open_split(fetch(data), split, transform, options=options)
    labels, outputs = dataset.labels, classes or model.config.num_classes
    try:
        found = match(labels.names, outputs, "outputs", numbered=labels.numbered)
    except ConfigError as error:
        raise DataError(f"{data}/{split}: {error}") from error
    labels = replace(labels, names=found.names)
    if found.outputs is not None:
        labels = labels.arranged(found.outputs)
    return replace(dataset, labels=labels)


def sample_evenly(dataset: ImageDataset, most: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Choose up to `most` evenly spaced images; return batches: uint8 (N, 3, H, W), labels (N,)."""
    chosen = torch.linspace(0, len(dataset) - 1, min(most, len(dataset))).long().tolist()
    # without `generator`, the DataLoader would draw a seed from the global generator
    return DataLoader(Subset(dataset, chosen), BATCH, generator=torch.Generator())
