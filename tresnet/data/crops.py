"""Decoded crops on their way from workers to the device that renders them.

A worker draws a sample's augmentation and decodes its crop, a `Sample`. It writes the crops of a
batch one after the other into an arena of bytes. The step's device makes images of these `Crops`
by `tresnet.ops.render`: it resizes, flips and augments them as the samples' rows say. A crop that
is large for the arena is resized by the worker, with the same result.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tresnet.ops.render import reference, render, runs_kernels
from tresnet.ops.render.rows import HEIGHT, OFFSET, ROWS, VERTICAL, make_row

# Bytes of an arena per byte of the batch's images. Images of 500 x 375 take 3.7 at 224 pixels
# when they are evaluated; their crops in training take 1.9 on average.
_ARENA = 4
_LONGEST = 8  # longest side of a crop in the arena, relative to the side that it is resized to


class RenderSpec(NamedTuple):
    """Size and filter to which all samples of a data set are resized."""

    size: tuple[int, int]  # height, width
    bicubic: bool
    channels: int = 0  # of images in float32, which workers complete; 0: RGB in uint8

    @property
    def image_bytes(self) -> int:
        return (4 * self.channels or 3) * math.prod(self.size)


class Sample(NamedTuple):
    """A decoded crop, (height, width, 3) in uint8, and the row that describes its image.

    If its `spec` has channels, the pixels are the image, (height, width, channels) in float32.
    """

    pixels: Tensor
    row: np.ndarray
    spec: RenderSpec

    @classmethod
    def of(cls, pixels: Tensor, row: np.ndarray, spec: RenderSpec) -> "Sample":
        """Return a sample of a crop; one in float32 is resized and flipped here."""
        if pixels.dtype == torch.uint8:
            return cls(pixels, row, spec)
        image = reference.resize_floats(pixels.numpy(), row, spec.size, spec.bicubic)
        return cls(torch.from_numpy(image), row, spec._replace(channels=image.shape[2]))

    def image(self) -> Tensor:
        """Return the image (3, height, width), uint8, as Pillow renders it.

        An image of other channels is (channels, height, width), float32.
        """
        if self.spec.channels:
            return self.pixels.permute(2, 0, 1)
        rows = torch.from_numpy(self.row)[None]
        return render(self.pixels.flatten(), rows, self.spec.size, bicubic=self.spec.bicubic)[0]

    def rendered(self) -> "Sample":
        """Return a sample whose pixels are the image, as Pillow renders it."""
        if self.spec.channels:
            return self
        row = make_row(self.spec.size, self.spec.size)
        return Sample(self.image().permute(1, 2, 0), row, self.spec)

    def fitted(self, room: int) -> "Sample":
        """Return the sample itself if its bytes fit into `room`, or else resized and flipped."""
        sides, resized = self.row[HEIGHT:ROWS], self.row[ROWS : ROWS + 2]
        if self.spec.channels:
            return self
        if self.pixels.numel() <= room and (sides <= _LONGEST * resized).all():
            return self
        image = reference.resize(self.pixels.numpy(), self.row, self.spec.size, self.spec.bicubic)
        row = self.row.copy()
        row[HEIGHT : VERTICAL + 1] = *self.spec.size, *self.spec.size, 0, 0, 0, 0
        return Sample(torch.from_numpy(np.array(image)), row, self.spec)


@dataclasses.dataclass(frozen=True)
class Crops:
    """Batch of crops: `pixels` (bytes,) in uint8, and `rows` (N, numbers) in float64 on the CPU.

    `capacity` is the size of a full batch's arena in bytes.
    """

    pixels: Tensor
    rows: Tensor
    spec: RenderSpec
    capacity: int

    def __len__(self) -> int:
        return len(self.rows)

    def render(self, device: torch.device) -> Tensor:
        """Return the images (N, 3, height, width) on `device`, uint8 in channels_last.

        If kernels cannot run there, Pillow renders. A copy from pinned memory is asynchronous.
        Images of other channels are complete, and float32.
        """
        pixels = self.pixels
        if self.spec.channels:
            images = pixels.view(torch.float32).view(len(self), *self.spec.size, -1)
            return images.permute(0, 3, 1, 2).to(device, non_blocking=True)
        if runs_kernels(device):
            # All batches take the same number of bytes, so the allocator uses the same memory.
            arena = torch.empty(self.capacity, dtype=torch.uint8, device=device)
            pixels = arena[: len(pixels)].copy_(pixels, non_blocking=True)
        images = render(pixels, self.rows, self.spec.size, bicubic=self.spec.bicubic)
        return images.to(device, non_blocking=True)


def arena_bytes(batch_size: int, spec: RenderSpec) -> int:
    """Return the size of a batch's arena."""
    return (1 if spec.channels else _ARENA) * batch_size * spec.image_bytes


def write_sample(
    sample: Sample, arena: np.ndarray, used: int, others: int
) -> tuple[int, np.ndarray]:
    """Write a sample behind the first `used` bytes of an arena; return the end and its row.

    `others` is the number of samples that are still to be written. Each has room for an image.
    """
    sample = sample.fitted(len(arena) - used - others * sample.spec.image_bytes)
    pixels = sample.pixels.view(torch.uint8)
    end = used + pixels.numel()
    torch.from_numpy(arena[used:end]).view(pixels.shape).copy_(pixels)
    row = sample.row.copy()
    row[OFFSET] = used
    return end, row


def device_bytes(size: tuple[int, int], channels: int = 3) -> int:
    """Return the GPU memory for each sample that rendering takes beside a step.

    It holds an arena, and images before, between and after the layers of a policy. Images of other
    channels are float32, before, while and after they are normalised.
    """
    return (_ARENA + 3 if channels == 3 else 3 * 4) * channels * math.prod(size)
