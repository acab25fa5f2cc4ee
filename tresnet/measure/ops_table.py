"""The operations of `tresnet bench ops`: inputs, definition in plain PyTorch, ours, ideal bytes.

All run channels last, in training, at the places where a tresnet_m has them. The ideal counts the
passes over feature maps that the data flow forces, each read or write once; per-channel vectors are
left out. S is the size of the input in bytes. Where a map fits in the GPU's cache, the second of two
passes can be cheaper than the ideal says.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 4
SLOPE = 1e-3
MOMENTUM, EPS = 0.1, 1e-5


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands in a tresnet_m.

    Attributes:
        name: for the record.
        channels: of the input.
        reduction: side of the image over side of the input.
        se: channels inside the squeeze and excitation; 0 for none.
    """

    name: str
    channels: int
    reduction: int
    se: int = 0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of an operation.

    Attributes:
        maps: feature maps, of which the benchmark keeps several copies.
        vectors: parameters and buffers, shared by all copies.
    """

    maps: tuple[Tensor, ...]
    vectors: tuple[Tensor, ...]

    def differentiated(self) -> list[Tensor]:
        """What a gradient is wanted of."""
        return [one for one in (*self.maps, *self.vectors) if one.requires_grad]


Function = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        places: where it is measured.
        make: its inputs for a shape (N, C, H, W), a place, a dtype and a device.
        reference: plain PyTorch, taking the maps, then the vectors.
        ours: the same by an implementation of this package, called as `reference` is.
        impls: the implementations of this package.
        ideal_bytes: for the sizes of the input and of the output, bytes of forward and backward.
    """

    places: tuple[Place, ...]
    make: Callable[[tuple[int, ...], Place, torch.dtype, torch.device], Inputs]
    reference: Function
    ours: Callable[..., Function]
    impls: tuple[str, ...]
    ideal_bytes: Callable[[int, int], tuple[int, int]]


def abn_bytes(x: int, y: int) -> tuple[int, int]:
    """BN + leaky ReLU: forward 3 S, backward 5 S.

    Forward: x for the statistics; x and y to apply. Backward: x and grad_y for the sums; x, grad_y
    and grad_x to apply.
    """
    return 2 * x + y, 4 * x + y


def abn_blur_bytes(x: int, y: int) -> tuple[int, int]:
    """BN + leaky ReLU, then the blur: y is S / 4; forward 2.25 S, backward 3.5 S.

    Forward: x for the statistics; x and the blurred y. Backward: x and grad_y for the sums; x, grad_y
    and grad_x to apply.
    """
    return 2 * x + y, 3 * x + 2 * y


def abn_se_bytes(x: int, y: int) -> tuple[int, int]:
    """BN + leaky ReLU, then SE: forward 4 S, backward 5 S.

    Forward: x for the statistics; x for the squeeze, which the activation keeps from following out
    of the statistics; x and y to apply and scale. Backward as `abn`: the sums of the gate's gradient
    are taken in the pass of those of BN.
    """
    return 3 * x + y, 4 * x + y


def abn_join_bytes(x: int, y: int) -> tuple[int, int]:
    """BN without activation, SE or none, + shortcut, ReLU: forward 4 S, backward 7 S.

    Forward: x for the statistics, out of which the squeeze follows; x, shortcut and y to apply.
    Backward: x, grad_y and y (for the ReLU) for the sums, writing the shortcut's gradient; x, that
    gradient and grad_x to apply.
    """
    return 3 * x + y, 6 * x + y


def blur_bytes(x: int, y: int) -> tuple[int, int]:
    """The blur: y is S / 4; x and y forward, grad_y and grad_x backward: 1.25 S each."""
    return x + y, x + y


def stem_bytes(x: int, y: int) -> tuple[int, int]:
    """uint8 images to scaled, channels-last blocks: x and y once; no gradient."""
    return x + y, 0


class _Abn:
    """BN and leaky ReLU with what follows: "", "blur", "se", or "join" (without activation)."""

    def __init__(self, follows: str = "") -> None:
        self.follows = follows
        self.slope = None if follows == "join" else SLOPE

    def make(
        self, shape: tuple[int, ...], place: Place, dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        """Maps: x, and the shortcut. Vectors: those of BN, then the blur's filter or the gate."""
        channels = shape[1]
        maps = [_map(shape, dtype, device) for _ in range(1 + (self.follows == "join"))]
        weight = torch.rand(channels, device=device).add_(0.5).requires_grad_()
        bias = torch.randn(channels, device=device).mul_(0.1).requires_grad_()
        running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        more = [_binomial(channels, dtype, device)] if self.follows == "blur" else []
        if place.se and self.follows in ("se", "join"):
            shapes = ((place.se, channels), (place.se,), (channels, place.se), (channels,))
            more = [torch.randn(one, device=device).mul_(0.1).requires_grad_() for one in shapes]
        return Inputs(tuple(maps), (weight, bias, *running, *more))

    def reference(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Plain PyTorch."""

        def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
            y = F.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS)
            return y if self.slope is None else F.leaky_relu_(y, self.slope)

        return self._composed(norm, x, *rest)

    def ours(self, impl: str) -> Function:
        """`abn`; "recompute" is plain operators whose saved activations are rebuilt."""
        from tresnet.ops import recompute
        from tresnet.ops.abn import SEWeights, abn

        settings: Any = {"training": True, "momentum": MOMENTUM, "eps": EPS, "slope": self.slope}
        settings["impl"] = "reference" if impl == "recompute" else impl

        def norm(x: Tensor, *vectors: Tensor) -> Tensor:
            with recompute.scope(impl == "recompute"):
                return abn(x, *vectors, **settings)

        def fused(x: Tensor, *rest: Tensor) -> Tensor:
            shortcut, vectors = self._parted(rest)
            more = vectors[4:]
            if self.follows == "blur":
                return abn(x, *vectors[:4], **settings, blur=True)
            gate = SEWeights(*more) if more else None
            return abn(x, *vectors[:4], **settings, se=gate, shortcut=shortcut)

        if impl == "triton":
            return fused
        return lambda x, *rest: self._composed(norm, x, *rest)

    def _parted(self, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The shortcut, and the vectors."""
        return (rest[0], rest[1:]) if self.follows == "join" else (None, rest)

    def _composed(self, norm: Function, x: Tensor, *rest: Tensor) -> Tensor:
        shortcut, vectors = self._parted(rest)
        y, more = norm(x, *vectors[:4]), vectors[4:]
        if self.follows == "blur":
            return _reference_blur(y, *more)
        y = _reference_se(y, *more) if more else y
        return y if shortcut is None else torch.relu_(y + shortcut)


def _abn(places: tuple[Place, ...], follows: str, nbytes: Callable[..., tuple[int, int]]) -> Op:
    op = _Abn(follows)
    return Op(places, op.make, op.reference, op.ours, ("recompute", "triton"), nbytes)


def _blur_inputs(
    shape: tuple[int, ...], place: Place, dtype: torch.dtype, device: torch.device
) -> Inputs:
    return Inputs((_map(shape, dtype, device),), (_binomial(shape[1], dtype, device),))


def _binomial(channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The filter as plain PyTorch keeps it, in a buffer."""
    row = torch.tensor([0.25, 0.5, 0.25], device=device, dtype=dtype)
    return (row[:, None] * row).expand(channels, 1, 3, 3).contiguous()


def _stem_inputs(
    shape: tuple[int, ...], place: Place, dtype: torch.dtype, device: torch.device
) -> Inputs:
    images = torch.randint(256, shape, dtype=torch.uint8, device=device)
    # The dtype of the blocks travels with the arguments, as an empty tensor.
    like = torch.empty(0, dtype=dtype, device=device)
    return Inputs((images.contiguous(memory_format=torch.channels_last),), (like,))


def _map(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    return x.requires_grad_()


def _reference_blur(x: Tensor, binomial: Tensor) -> Tensor:
    padded = F.pad(x, [1, 1, 1, 1], mode="reflect")
    return F.conv2d(padded, binomial, stride=2, groups=x.shape[1])


def _reference_se(x: Tensor, *gate: Tensor) -> Tensor:
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = (one.to(x.dtype) for one in gate)
    hidden = torch.relu_(F.linear(x.mean((2, 3)), fc1_weight, fc1_bias))
    return x * torch.sigmoid(F.linear(hidden, fc2_weight, fc2_bias))[:, :, None, None]


def _reference_stem(images: Tensor, like: Tensor) -> Tensor:
    n, c, h, w = images.shape
    b = BLOCK_SIZE
    x = images.to(like.dtype).div_(255).view(n, c, h // b, b, w // b, b)
    x = x.permute(0, 3, 5, 1, 2, 4).reshape(n, b * b * c, h // b, w // b)
    return x.contiguous(memory_format=torch.channels_last)


def _our_blur(impl: Any) -> Function:
    from tresnet.ops.blur_pool import blur_pool

    return lambda x, *_: blur_pool(x, impl=impl)


def _our_stem(impl: Any) -> Function:
    from tresnet.ops.space_to_depth import stem_input

    return lambda images, like: stem_input(images, BLOCK_SIZE, like.dtype, impl=impl)


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
_PLAIN = ("reference", "triton")

# The heaviest first: a measurement that is cut short has what counts most.
OPS: dict[str, Op] = {
    "abn_join": _abn(_JOINS, "join", abn_join_bytes),
    "abn": _abn(_INNER, "", abn_bytes),
    "abn_blur": _abn(_HALVED, "blur", abn_blur_bytes),
    "abn_se": _abn((Place("stage 3 inner", 256, 16, se=128),), "se", abn_se_bytes),
    "blur": Op(_HALVED, _blur_inputs, _reference_blur, _our_blur, _PLAIN, blur_bytes),
    "stem": Op(
        (Place("image", 3, 1),), _stem_inputs, _reference_stem, _our_stem, _PLAIN, stem_bytes
    ),
}
