"""The formula people use: a sum over layers, without an allocator and without autograd.

From 'GPU memory usage for deep learning image processing' (2023), after Gao et al., 'Estimating
GPU Memory Consumption of Deep Learning Models' (ESEC/FSE 2020):

    training  = D + W + O b + W (d + m) + (O + D)
    inference = D + W + O

It is here to be compared with; `tresnet.memory.predict` is far closer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.errors import InputError
from tresnet.memory.fake import fake_copy
from tresnet.memory.plan import Plan

# Layers the document takes to work in place.
_MEMORYLESS = (
    nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.GLU, nn.PReLU, nn.GELU, nn.Mish,
    nn.Softmin, nn.Softmax, nn.Softmax2d, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AlphaDropout, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
)  # fmt: skip
# nn.MultiheadAttention hides its layers; the document counts its output five times.
_ATTENTION_OUTPUTS = 5
_ITEM_BYTES = 4  # of float32: weights and outputs
_MOMENTS = {"sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1}
_ADAM_MOMENTS = 2


@dataclass(frozen=True)
class Formula:
    """The terms of the formula, in bytes (D, W, O) and as factors (b, d, m)."""

    data_bytes: int
    weight_bytes: int
    output_bytes: int
    mixed_precision: float
    data_parallel: int
    moments: int

    @property
    def training_bytes(self) -> int:
        """D + W + O b + W (d + m) + (O + D)."""
        forward = self.data_bytes + self.weight_bytes + self.output_bytes * self.mixed_precision
        gradients = self.weight_bytes * (self.data_parallel + self.moments)
        return int(forward + gradients + self.output_bytes + self.data_bytes)

    @property
    def inference_bytes(self) -> int:
        """D + W + O."""
        return self.data_bytes + self.weight_bytes + self.output_bytes


def formula(model: nn.Module, plan: Plan) -> Formula:
    """Count the terms on a fake forward pass of `model`; the model itself is left alone.

    Raises:
        InputError: an optimizer whose moments the formula does not define.
    """
    name = plan.optimizer_name
    if name not in _MOMENTS and not name.startswith(("adam", "nadam", "radam")):
        raise InputError(
            f"the formula knows sgd, sgd_momentum, adagrad, rmsprop and adam, got {name!r}: "
            "use method='trace'"
        )
    outputs, weights = _count(model, plan)
    return Formula(
        data_bytes=prod(plan.input_shape) * plan.input_dtype.itemsize,
        weight_bytes=weights * _ITEM_BYTES,
        output_bytes=outputs * _ITEM_BYTES,
        mixed_precision=1.0 if plan.amp is None else 0.5,
        data_parallel=2 if plan.ddp else 1,
        moments=_MOMENTS.get(name, _ADAM_MOMENTS),
    )


def _count(model: nn.Module, plan: Plan) -> tuple[int, int]:
    """Elements of layer outputs and of layer weights, counted at every call of a layer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cpu")
    copied = fake_copy(model, mode, device, channels_last=False).eval()
    outputs: list[torch.Size] = []
    weights: list[int] = []
    calls: list[torch.Size] = []

    def counter(module: nn.Module) -> Callable[..., None]:
        n_weights = sum(p.numel() for p in module.parameters() if p.requires_grad)
        times = _ATTENTION_OUTPUTS if isinstance(module, nn.MultiheadAttention) else 1
        counts_output = not isinstance(module, _MEMORYLESS)

        def hook(_: nn.Module, __: object, output: object) -> None:
            first = next(_tensors(output), None)
            if first is None:
                return
            calls.append(first.shape)
            weights.append(n_weights)
            if counts_output:
                outputs.extend([first.shape] * times)

        return hook

    for module in copied.modules():
        if not list(module.children()) or isinstance(module, nn.MultiheadAttention):
            module.register_forward_hook(counter(module))
    with mode, torch.no_grad():
        copied(torch.empty(plan.input_shape, dtype=plan.input_dtype))
    # The model's own output comes on top of its last layer's.
    total = sum(prod(shape) for shape in outputs) + prod(calls[-1][1:])
    return total, sum(weights)


def _tensors(output: object) -> Iterator[torch.Tensor]:
    yield from (t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
