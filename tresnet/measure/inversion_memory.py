"""What activated batch norms keep for backward, counted from the tensors of a real training step."""

import dataclasses
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tresnet.errors import MissingDependencyError
from tresnet.layers.norm import ABN, NormAct, norm_class
from tresnet.measure.inverting import InvertingABN, invert_in
from tresnet.measure.live import LivePeak
from tresnet.models.zoo import build
from tresnet.ops import recompute

METHOD = {
    "kept": "unique storages alive between forward and backward, less parameters, buffers, input "
    "and output; float32",
    "peak": "the most alive at once in forward and backward, less the same, a parameter's gradient "
    "let go as soon as it is complete",
    "inverting": "norm='abn' with the output saved and inverted; blur, pools and SE are rebuilt in "
    "backward as for norm='abn'",
    "inplace_abn": "the inplace-abn package in a model with norm='inplace_abn'",
}
CASES = ("batchnorm", "inplace_abn", "inverting", "abn")
_PAIR_CHANNELS, _PAIR_SIDE = 64, 56


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """What one norm keeps in one network.

    Attributes:
        case: `batchnorm` (plain PyTorch), `inplace_abn` (the package), `inverting`, or `abn` (ours).
        network: `conv, norm, conv`, or a model's name.
        batch_size: images.
        status: `ok` or `left_out`.
        kept_bytes: for the whole batch; see `METHOD`.
        kept_mib_per_image: the same by image.
        peak_mib_per_image: see `METHOD`.
        kept_maps: between two convolutions, in units of the norm's input.
        note: why it is left out.
    """

    case: str
    network: str
    batch_size: int
    status: str = "ok"
    kept_bytes: int | None = None
    kept_mib_per_image: float | None = None
    peak_mib_per_image: float | None = None
    kept_maps: float | None = None
    note: str | None = None


class _Pair(nn.Module):
    """Convolution, norm with activation, convolution, with what follows rebuilt as in a model."""

    def __init__(self, norm: NormAct) -> None:
        super().__init__()
        channels = norm.num_features
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = norm
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        with recompute.scope(isinstance(self.norm, ABN)):
            return self.second(self.norm(self.first(x)))


def measure_memory(
    model: str, batch_size: int, input_size: int, device: torch.device
) -> list[MemoryRow]:
    """Count for every norm: alone between two convolutions, and in a model.

    Args:
        model: one of ours.
        batch_size: images.
        input_size: side of the image in pixels.
        device: where to run.

    Raises:
        InputError: no such model, or an image that it cannot take.
    """
    pair_shape = (batch_size, _PAIR_CHANNELS, _PAIR_SIDE, _PAIR_SIDE)
    images = (batch_size, 3, input_size, input_size)
    rows = [
        *_rows("conv, norm, conv", lambda case: _Pair(_norm(case)), pair_shape, device),
        *_rows(model, lambda case: _model(model, case), images, device),
    ]
    map_bytes = 4 * batch_size * _PAIR_CHANNELS * _PAIR_SIDE**2
    return [
        dataclasses.replace(row, kept_maps=row.kept_bytes / map_bytes)
        if row.network != model and row.kept_bytes is not None
        else row
        for row in rows
    ]


def _norm(case: str) -> NormAct:
    cls = InvertingABN if case == "inverting" else norm_class(case)
    return cls(_PAIR_CHANNELS, 1e-3)


def _model(name: str, case: str) -> nn.Module:
    if case == "inverting":
        return invert_in(build(name, norm="abn"))
    return build(name, norm=case)


def _rows(
    network: str,
    make: Callable[[str], nn.Module],
    shape: tuple[int, ...],
    device: torch.device,
) -> Iterator[MemoryRow]:
    for case in CASES:
        try:
            module = make(case).to(device).train()
        except MissingDependencyError as error:
            yield MemoryRow(case, network, shape[0], "left_out", note=str(error))
            continue
        kept, peak = count_kept(module, torch.rand(shape, device=device))
        per_image = 2**20 * shape[0]
        yield MemoryRow(case, network, shape[0], "ok", kept, kept / per_image, peak / per_image)


def count_kept(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the peak of the step; see `METHOD`."""
    handles = [
        parameter.register_post_accumulate_grad_hook(_let_go) for parameter in module.parameters()
    ]
    try:
        with LivePeak() as live:
            for tensor in (*module.parameters(), *module.buffers(), x):
                live.add(tensor)
            before = live.live_bytes
            y = module(x)
            gc.collect()
            kept = live.live_bytes - y.untyped_storage().nbytes() - before
            y.backward(torch.zeros_like(y))
    finally:
        for handle in handles:
            handle.remove()
    return kept, live.peak_bytes - before


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None
