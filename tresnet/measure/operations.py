"""Operations of `tresnet bench ops`: inputs, plain PyTorch, our kernels, ideal bytes.

All run channels last, in training, at the places where a tresnet_m has them. The ideal counts the
reads and writes of feature maps that the data flow requires, each once; vectors per channel are not
counted. If a map fits in the GPU's cache, the second of two reads can cost less than the ideal.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops import abn
from tresnet.ops.abn import reference as plain_abn
from tresnet.ops.blur_pool.reference import binomial_filter
from tresnet.ops.space_to_depth import reference as plain_blocks
from tresnet.ops.space_to_depth import stem_input

BLOCK_SIZE = 4
SLOPE = 1e-3


class Place(NamedTuple):
    """A place in a tresnet_m where an operation is."""

    name: str
    channels: int
    reduction: int
    se: int = 0


class Inputs(NamedTuple):
    """Arguments of an operation: feature maps, which are copied, and vectors, which are not."""

    maps: tuple[Tensor, ...]
    vectors: tuple[Tensor, ...]

    def differentiated(self) -> list[Tensor]:
        """Return the tensors that get a gradient."""
        return [one for one in (*self.maps, *self.vectors) if one.requires_grad]


Function = Callable[..., Tensor]


class Op(NamedTuple):
    """One operation: its places, its inputs, its plain PyTorch and its kernels.

    `make` takes a shape (N, C, H, W), a place, a dtype and a device. `plain` and `fused` take the
    maps, then the vectors. `forward` and `backward` count reads and writes of the input, and of the
    output; zeros mean no gradient.
    """

    places: tuple[Place, ...]
    make: Callable[[tuple[int, ...], Place, torch.dtype, torch.device], Inputs]
    plain: Function
    fused: Function
    forward: tuple[int, int]
    backward: tuple[int, int]

    def ideal_bytes(self, x_bytes: int, y_bytes: int) -> dict[str, int]:
        """Return the bytes that must be moved for an input and an output, by direction."""
        return {
            direction: x * x_bytes + y * y_bytes
            for direction, (x, y) in (("forward", self.forward), ("backward", self.backward))
            if x
        }


def _abn(
    follows: str, places: tuple[Place, ...], forward: tuple[int, int], backward: tuple[int, int]
) -> Op:
    """Return BN and leaky ReLU, then `follows`: "", "blur", "se", or "join" (no leaky ReLU)."""
    blurs, joins = follows == "blur", follows == "join"
    numbers: dict[str, Any] = {"training": True, "momentum": 0.1, "eps": 1e-5}
    numbers["slope"] = None if joins else SLOPE

    def make(
        shape: tuple[int, ...], place: Place, dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        channels = shape[1]
        maps = [_map(shape, dtype, device) for _ in range(1 + joins)]
        weight = torch.rand(channels, device=device).add_(0.5).requires_grad_()
        bias = torch.randn(channels, device=device).mul_(0.1).requires_grad_()
        running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        more = [binomial_filter(maps[0].detach())] if blurs else []
        if place.se and follows in ("se", "join"):
            shapes = ((place.se, channels), (place.se,), (channels, place.se), (channels,))
            more = [torch.randn(one, device=device).mul_(0.1).requires_grad_() for one in shapes]
        return Inputs(tuple(maps), (weight, bias, *running, *more))

    def parted(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Any, tuple[Tensor, ...]]:
        """Return the shortcut, the vectors of BN, and the weights of the gate or blur."""
        vectors = rest[joins:]
        return rest[0] if joins else None, vectors[:4], vectors[4:]

    def plain(x: Tensor, *rest: Tensor) -> Tensor:
        shortcut, norm, more = parted(rest)
        y = plain_abn.abn(x, *norm, **numbers)
        if blurs:
            padded = F.pad(y, [1, 1, 1, 1], mode="reflect")
            return F.conv2d(padded, *more, stride=2, groups=y.shape[1])
        return plain_abn.tail(y, False, [one.to(x.dtype) for one in more] or None, shortcut)

    def fused(x: Tensor, *rest: Tensor) -> Tensor:
        shortcut, norm, more = parted(rest)
        what: dict[str, Any] = {"blur": blurs, **numbers}
        return _Launches.apply(what, x, shortcut, *norm, *(() if blurs else more))  # pyright: ignore[reportReturnType]

    return Op(places, make, plain, fused, forward, backward)


class _Launches(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, what: dict[str, Any], x: Tensor, shortcut: Tensor | None, *vectors: Tensor
    ) -> Tensor:
        weight, bias, mean, var, *layers = vectors
        se = abn.SEWeights(*layers) if layers else None
        ctx.norm = abn.Norm(weight, bias, mean, var, se=se, **what)
        y, ctx.kept = abn.forward(x, ctx.norm, kernels=True, shortcut=shortcut, keeps=True)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        sums = abn.gradient_sums(grad, None, ctx.norm, ctx.kept, kernels=True, rebuilds=False)
        grad = grad if sums.written is None else sums.written
        grad_x = abn.gradient(grad, ctx.norm, ctx.kept, sums, kernels=True)
        weight, bias = sums.merged[:2]
        return None, grad_x, sums.written, weight, bias, None, None, *(sums.se or ())


def _stem() -> Op:
    """Return the operation that turns images of bytes into scaled, channels-last blocks."""

    def make(
        shape: tuple[int, ...], place: Place, dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        images = torch.randint(256, shape, dtype=torch.uint8, device=device)
        # An empty tensor carries the dtype of the blocks.
        like = torch.empty(0, dtype=dtype, device=device)
        return Inputs((images.contiguous(memory_format=torch.channels_last),), (like,))

    def plain(images: Tensor, like: Tensor) -> Tensor:
        return plain_blocks.space_to_depth(images.to(like.dtype).div_(255), BLOCK_SIZE)

    def fused(images: Tensor, like: Tensor) -> Tensor:
        return stem_input(images, BLOCK_SIZE, like.dtype, kernels=True)

    return Op((Place("image", 3, 1),), make, plain, fused, (1, 1), (0, 0))


def _map(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    return x.requires_grad_()


_INNER = (
    Place("stage 1", 64, 4),
    Place("stage 2", 128, 8),
    Place("stage 3 inner", 256, 16),
    Place("stage 4 inner", 512, 32),
)
_HALVED = (
    Place("into stage 2", 128, 4),
    Place("into stage 3", 256, 8),
    Place("into stage 4", 512, 16),
)
_JOINS = (
    Place("stage 1", 64, 4, se=64),
    Place("stage 2", 128, 8, se=64),
    Place("stage 3 outer", 1024, 16),
    Place("stage 4 outer", 2048, 32),
)

# The heaviest operation comes first, in case the measurement is cut short. Reads and writes:
#   abn       forward: x for the statistics; x and y to apply. Backward: x and grad_y for the sums;
#             x, grad_y and grad_x to apply.
#   abn_blur  as abn, but y is blurred and a quarter of the size, and so is its gradient.
#   abn_se    forward: x once more for the squeeze, as the mean of activations does not follow from
#             the statistics. Backward: the gate's sums are taken in the same pass as those of BN.
#   abn_join  forward: the shortcut too; the squeeze follows from the statistics. Backward: the
#             shortcut's gradient is written, then read to apply. The ReLU's sign bits are left out.
OPS: dict[str, Op] = {
    "abn_join": _abn("join", _JOINS, (3, 1), (5, 1)),
    "abn": _abn("", _INNER, (2, 1), (4, 1)),
    "abn_blur": _abn("blur", _HALVED, (2, 1), (3, 2)),
    "abn_se": _abn("se", (Place("stage 3 inner", 256, 16, se=128),), (3, 1), (4, 1)),
    "stem": _stem(),
}
