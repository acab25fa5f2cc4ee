"""Time of activated batch norms that invert their output and of ours, as `tresnet bench ops` takes it.

Alone, ours does without a pass that its user pays: the next convolution needs the activation again in
backward, which inverting has kept and ours has to rebuild. So ours comes with and without that.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.measure.bench import bench_switches
from tresnet.measure.bench_ops import OpRow, OpsSettings, measure_place
from tresnet.measure.inverting import InplaceByPackage, InvertingBatchNorm
from tresnet.measure.ops_table import EPS, MOMENTUM, OPS, SLOPE, Function, Inputs, Op
from tresnet.ops import recompute
from tresnet.ops.abn import abn, reference
from tresnet.ops.abn.autograd import ActivatedBatchNorm

METHOD = {
    "eager": "plain PyTorch, which keeps two buffers",
    "inductor": "the same compiled, as `abn` is under torch.compile",
    "recompute": "ours by plain operators",
    "inverting": "saves the output, inverts it in float32, by plain operators",
    "inverting_narrow": "the same, inverting in 16 bits",
    "inplace_abn": "the inplace-abn package",
    "triton": "ours by the fused kernels",
    "compiled": "..._compiled is the same by torch.compile",
    "rebuild": "...+rebuild counts in backward what gives the next convolution its input again; the "
    "others keep it or, without +rebuild, leave that out",
}
_REBUILD = "+rebuild"


def contenders(dtype: str, device: torch.device) -> tuple[str, ...]:
    """Who is timed beside a copy of the same bytes, eager PyTorch and Inductor."""
    names = ["recompute", "recompute+rebuild", "inverting"]
    if dtype != "fp32":
        names.append("inverting_narrow")
    names += ["recompute_compiled", "recompute_compiled+rebuild", "inverting_compiled"]
    if device.type == "cuda":
        names += ["triton", "triton+rebuild"]
    return (*names, "inplace_abn")


def check_stages(stages: Sequence[int]) -> None:
    """Raise `InputError` if a model has no such stage."""
    most = len(OPS["abn"].places)
    for stage in stages:
        if not 1 <= stage <= most:
            raise InputError(f"expected stages from 1 to {most}, got {stage}")


def measure_times(
    dtypes: Sequence[str],
    stages: Sequence[int],
    layouts: Sequence[str],
    settings: OpsSettings,
    device: torch.device,
    log: Callable[[str], object],
) -> list[tuple[str, OpRow]]:
    """Time every contender at places of a tresnet_m, each with its layout.

    Args:
        dtypes: fp32, bf16 or fp16.
        stages: of the model, 1 to 4.
        layouts: channels_last or contiguous.
        settings: sizes and repeats; after its time limit no case is begun.
        device: where.
        log: called with a line of progress.
    """
    check_stages(stages)
    places = OPS["abn"].places
    rows, began_s = [], time.perf_counter()
    with bench_switches(device, compiling=True):
        for stage, layout, dtype in itertools.product(stages, layouts, dtypes):
            place = places[stage - 1]
            label = f"{place.name}, {layout}, {dtype}"
            limit_s = settings.time_limit_s
            if limit_s is not None and time.perf_counter() - began_s > limit_s:
                log(f"{label}: not begun, the time limit has passed")
                continue
            op = _operation(layout, dtype, device)
            found = measure_place(op, "abn", place, dtype, device, settings)
            log(f"{label}: {sum(row.p50_us is not None for row in found)} of {len(found)} timed")
            rows += [(layout, row) for row in found]
    return rows


def _operation(layout: str, dtype: str, device: torch.device) -> Op:
    """The table's `abn` with these contenders."""
    plain = OPS["abn"]

    def make(*arguments: Any) -> Inputs:
        inputs = plain.make(*arguments)
        if layout == "channels_last":
            return inputs
        maps = tuple(one.detach().contiguous().requires_grad_() for one in inputs.maps)
        return Inputs(maps, inputs.vectors)

    compiled = functools.cache(_compiled)  # shared by the contenders of one case
    return Op(
        plain.places,
        make,
        plain.reference,
        lambda contender: _function(contender, dtype, device, compiled),
        contenders(dtype, device),
        plain.ideal_bytes,
    )


def _function(
    contender: str, dtype: str, device: torch.device, compiled: Callable[[str], Any]
) -> Function:
    name = contender.removesuffix(_REBUILD)
    norm: Function
    if name in ("recompute", "triton"):
        impl: Any = name
        norm = functools.partial(
            abn, training=True, momentum=MOMENTUM, eps=EPS, slope=SLOPE, impl=impl
        )
    elif name == "recompute_compiled":
        norm = functools.partial(_offering, compiled("recompute"), compiled("affine"))
    elif name == "inverting_compiled":
        norm = compiled("inverting")
    elif name == "inplace_abn":
        if dtype == "bf16" or (dtype == "fp16" and device.type == "cpu"):
            raise InputError(f"inplace-abn has no {dtype} for {device.type} with fp32 parameters")
        norm = InplaceByPackage(MOMENTUM, EPS, SLOPE)
    else:
        norm = functools.partial(_inverting, wide=name == "inverting")
    return functools.partial(_read_again, norm) if contender.endswith(_REBUILD) else norm


def _inverting(*inputs: Tensor, wide: bool = True) -> Tensor:
    return InvertingBatchNorm.apply(*inputs, MOMENTUM, EPS, SLOPE, "plain", wide)  # pyright: ignore[reportReturnType]


def _recompute(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ActivatedBatchNorm.apply(*inputs, True, MOMENTUM, EPS, SLOPE)  # pyright: ignore[reportReturnType]


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return reference.affine(x, scale, shift, SLOPE)


def _compiled(name: str) -> Any:
    function = {"recompute": _recompute, "affine": _affine, "inverting": _inverting}[name]
    return torch.compile(function, fullgraph=True, dynamic=False)


def _offering(norm: Callable[..., Any], affine: Any, x: Tensor, *vectors: Tensor) -> Tensor:
    """What `abn` does around its function, with both parts compiled."""
    y, scale, shift = norm(x, *vectors)
    recompute.offer(y, affine, x, scale, shift)
    return y


def _read_again(norm: Function, x: Tensor, *vectors: Tensor) -> Tensor:
    with recompute.scope():
        return _Reader.apply(norm(x, *vectors))  # pyright: ignore[reportReturnType]


class _Reader(torch.autograd.Function):
    """In the place of a convolution: keeps its input for backward and asks for it there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.view_as(y)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> Tensor:
        _ = ctx.saved_tensors
        return grad
