"""Run recurrent layers on fake tensors as cuDNN does: one operator for all layers and time steps.

cuDNN keeps a buffer, the reserve space, from forward to backward. PyTorch's fake kernel makes this
buffer empty, and NVIDIA does not publish its size. We derive it from PyTorch's issue 2895 (2017).
For four layers of 320 units in fp32, cuDNN reserved 736,000,000 B for an LSTM, and 864,000,000 B
for a GRU. We assume 25,000 time steps (summed over samples). The LSTM's bytes are then exactly its
four gates, its cell and the outputs between layers. The size for a plain RNN is a guess.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten

# cuDNN numbers the kinds of layers from 0 to 3. For backward, it keeps `_KEPT` values per layer,
# hidden unit and time step.
_RELU, _TANH, _LSTM, _GRU = range(4)
_KEPT = {_RELU: 2, _TANH: 2, _LSTM: 5, _GRU: 6}


def reserve_bytes(mode: int, steps: int, hidden: int, layers: int, itemsize: int) -> int:
    """Return the bytes that cuDNN keeps for backward in all `layers` together.

    `steps` is time steps times samples times directions. Each layer keeps its gates and states. All
    layers except the last also keep their outputs.
    """
    return steps * hidden * (layers * _KEPT[mode] + layers - 1) * itemsize


def run(
    mode: int, x: Tensor, hidden: Any, weights: list[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run an LSTM, GRU or plain RNN by cuDNN; `mode` is _LSTM, _GRU, _TANH or _RELU."""
    hx, cx = hidden if mode == _LSTM else (hidden, None)
    size = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != size else 0
    autocast = torch.is_autocast_enabled("cuda")
    if autocast:  # casts to float16 even if autocast's dtype is bfloat16 (AutocastRNN.cpp)
        x, hx, cx = x.half(), hx.half(), None if cx is None else cx.half()
    settings = mode, size, projected, layers, batch_first, dropout, train, bidirectional
    with torch.autocast("cuda", enabled=False) if autocast else contextlib.nullcontext():
        results = _Sequence.apply(settings, x, hx, cx, *weights)
    return results if cx is not None else results[:2]


class _Sequence(torch.autograd.Function):
    """Custom Function around cuDNN's forward and backward operators.

    PyTorch's own node is not used, because it copies the reserve space when Python calls the node.
    `settings` are the arguments of `aten._cudnn_rnn` from `mode` to `bidirectional`.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: tuple, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        flat = weights[0]
        if x.dtype != flat.dtype or not are_flat(weights):
            flat = x.new_empty(sum(w.numel() for w in weights))
        ctx.settings = settings
        # The 0 replaces the number of weights per layer, which only a real kernel reads.
        *outputs, reserve, _ = aten._cudnn_rnn(x, weights, 0, flat, hx, cx, *settings, [], None)
        ctx.save_for_backward(x, hx, cx, outputs[0], reserve, flat, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        x, hx, cx, output, reserve, flat, *weights = ctx.saved_tensors
        dx, dhx, dcx, made = aten._cudnn_rnn_backward(
            x, weights, 0, flat, hx, cx, output, *gradients, *ctx.settings, [], None, reserve,
            [True] * 4,
        )  # fmt: skip
        return None, dx, dhx, dcx, *made


def fake_forward(
    x: Tensor, weights: list[Tensor], per_layer: int, flat: Tensor, hx: Tensor, cx: Tensor | None,
    mode: int, size: int, projected: int, layers: int, batch_first: bool, dropout: float,
    train: bool, bidirectional: bool, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return fake results of `aten._cudnn_rnn`: output, states, reserve space and flat weights."""
    batch, length = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    directions = 1 + bidirectional
    output = x.new_empty(length, batch, (projected or size) * directions)
    steps = length * batch * directions if train else 0
    reserve = reserve_bytes(mode, steps, size, layers, x.itemsize)
    return (
        output.transpose(0, 1) if batch_first else output,
        torch.empty_like(hx),
        hx.new_empty(0) if cx is None else torch.empty_like(cx),
        x.new_empty(reserve, dtype=torch.uint8),
        flat,
    )


def fake_backward(
    x: Tensor, weights: list[Tensor], per_layer: int, flat: Tensor, hx: Tensor, cx: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Return fake results of `aten._cudnn_rnn_backward`; weight gradients share one buffer."""
    made = x.new_empty(sum(w.numel() for w in weights))
    parts = made.split([w.numel() for w in weights])
    return (
        torch.empty_like(x),
        torch.empty_like(hx),
        None if cx is None else torch.empty_like(cx),
        [part.view(w.shape) for part, w in zip(parts, weights, strict=True)],
    )


def are_flat(weights: list[Tensor] | tuple[Tensor, ...]) -> bool:
    """Return whether all weights are views into one buffer."""
    return len({w.untyped_storage()._cdata for w in weights}) == 1


def flatten(layer: nn.RNNBase) -> None:
    """Make a layer's weights views into one buffer, as `flatten_parameters` does on a GPU."""
    weights = [weight for weight in layer._flat_weights if weight is not None]
    if are_flat(weights) or any(w.device.type != "cuda" for w in weights):
        return
    with torch.no_grad():
        flat = weights[0].new_zeros(sum(w.numel() for w in weights))
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.set_(part.view(weight.shape))


KERNELS = {
    aten.lstm.input: functools.partial(run, _LSTM),
    aten.gru.input: functools.partial(run, _GRU),
    aten.rnn_tanh.input: functools.partial(run, _TANH),
    aten.rnn_relu.input: functools.partial(run, _RELU),
}
FAKES = {
    aten._cudnn_rnn.default: fake_forward,
    aten._cudnn_rnn_backward.default: fake_backward,
}
