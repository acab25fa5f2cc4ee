"""The model as other runtimes take it: folded, of convolutions, pools, activations and a head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tresnet.errors import InputError
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.norm import NormAct
from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats
from tresnet.surgery.fold import fold

Input = Literal["float", "uint8"]


@dataclass(frozen=True)
class Images:
    """The images that an exported model takes: (N, channels, height, width), any N.

    Attributes:
        channels: of an image.
        height: in pixels; where `dynamic_size`, that of the example it was traced with.
        width: in pixels, likewise.
        multiple: what height and width must be divisible by, at least five times.
        dynamic_size: whether other heights and widths will do.
        input: 'float' in [0, 1], or 'uint8'.
        channels_last: the layout in memory, which compiled packages are made for.
    """

    channels: int
    height: int
    width: int
    multiple: int
    dynamic_size: bool
    input: Input
    channels_last: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return torch.uint8 if self.input == "uint8" else torch.float32

    @property
    def memory_format(self) -> torch.memory_format:
        """Of the tensor."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def check(self, x: Any) -> None:
        """Check images that a caller wants computed.

        Raises:
            InputError: type, shape or layout differ from these.
        """
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != self.channels:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"expected images (N, {self.channels}, H, W), got {got}")
        if x.dtype != self.dtype:
            what = "bytes" if self.input == "uint8" else "floats in [0, 1]"
            raise InputError(
                f"expected {self.dtype} ({what}), got {x.dtype}: convert, or export anew"
            )
        size, (h, w) = (self.height, self.width), x.shape[2:]
        if not self.dynamic_size and (h, w) != size:
            raise InputError(
                f"expected height and width {size}, got {(h, w)}: resize, or export with "
                "dynamic_size"
            )
        if h % self.multiple or w % self.multiple or min(h, w) < 5 * self.multiple:
            raise InputError(
                f"expected height and width divisible by {self.multiple} and at least "
                f"{5 * self.multiple}, got {(h, w)}: pad or resize"
            )
        if len(x) == 0:
            raise InputError("expected at least one image, got none")
        if not x.is_contiguous(memory_format=self.memory_format):
            raise InputError(
                f"expected images in {self.memory_format}, got strides {x.stride()} for shape "
                f"{tuple(x.shape)}: call x.contiguous(memory_format={self.memory_format})"
            )

    def prepare(self, images: Tensor) -> Tensor:
        """Images of bytes in the type and layout that is taken."""
        if self.input == "uint8":
            return images.contiguous(memory_format=self.memory_format)
        return unit_floats(images, memory_format=self.memory_format)

    def random(self, count: int, height: int, width: int) -> Tensor:
        """Noise of bytes (count, channels, height, width), the same each time."""
        generator = torch.Generator().manual_seed(count)
        shape = (count, self.channels, height, width)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def samples(self) -> Iterator[Tensor]:
        """Bytes of two batch sizes and, where they may vary, two more image sizes."""
        yield self.random(1, self.height, self.width)
        yield self.random(3, self.height, self.width)
        if self.dynamic_size:  # one with odd feature maps, neither square
            side = self.multiple
            yield self.random(2, self.height + side, self.width + 4 * side)
            yield self.random(1, 7 * side, 5 * side)


class BlurByPools(nn.Module):
    """`BlurPool2d`, reflected border included, as two average pools: no padded copy, no filter.

    [1, 2, 1] / 4 at stride 2 is a mean of two neighbours, then a mean of two neighbouring means at
    stride 2. A pixel reflected at the border repeats the first mean, so that the border's result is
    that mean itself: what a pool does that counts no padding.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, ceil(H/2), ceil(W/2))."""
        means = F.avg_pool2d(x, 2, stride=1)
        return F.avg_pool2d(means, 2, stride=2, padding=1, count_include_pad=False)


def plain_model(model: nn.Module) -> TResNet:
    """Return a copy of `model` for export: folded, the stem one convolution, blurs as pools.

    Args:
        model: a TResNet in eval mode, its weights in float32; unchanged.

    Raises:
        InputError: it is something else, or cannot be folded.
    """
    if not isinstance(model, TResNet):
        raise InputError(
            f"expected a TResNet from tresnet.create that gives logits, got {type(model).__name__}"
        )
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        raise InputError(f"expected weights in float32, got {dtype}: call model.float() first")
    plain = fold(model, merge_stem=True).to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    for parent in list(plain.modules()):
        for name, child in parent.named_children():
            if isinstance(child, BlurPool2d):
                parent.register_module(name, BlurByPools())
            elif isinstance(child, NormAct):
                raise InputError(
                    f"{name} ({type(child).__name__}) cannot be folded, so not exported"
                )
    return plain


def trace(plain: nn.Module, images: Images, device: torch.device) -> ExportedProgram:
    """Record what the model does with images, for any number of them."""
    bytes_ = images.random(2, images.height, images.width)
    example = images.prepare(bytes_).to(device)
    shape: dict[int, Any] = {0: Dim("batch", min=1)}
    if images.dynamic_size:
        for dim, name in ((2, "height"), (3, "width")):
            shape[dim] = images.multiple * Dim(f"{name}_blocks", min=5)
    with torch.no_grad():
        return torch.export.export(plain, (example,), dynamic_shapes=(shape,))
