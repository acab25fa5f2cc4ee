"""Comparison of a group's kernels with their definitions, at the group's first use on a GPU.

The group runs on a synthetic map of its input's shape, with random parameters: forward and, if
anything is trained, backward. Each operation between two convolutions then runs twice on equal
tensors: by kernels, and by its definition in plain PyTorch. The results must agree within rounding.
Otherwise plain modules run the group from then on. Later calls of groups with equal settings,
dtypes and widths find the verdict.

The user's own maps and parameters would not do. Gammas of a new model are 0, so wrong gradients
behind them would not show. Sums of constant images cancel. And near the kink of a leaky ReLU,
rounding decides a slope. Synthetic maps keep away from that kink.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from tresnet.fused.block_specs import FusedBlocks
from tresnet.fused.execution import run_fused
from tresnet.fused.stage import Options
from tresnet.layers.norm import FrozenRunningStats
from tresnet.ops import epilogue as kernels
from tresnet.ops.epilogue import Saved, definition
from tresnet.ops.launching import Launch, recorded_launches
from tresnet.ops.stem import stem_input
from tresnet.ops.tiles import blurred
from tresnet.ops.verdict import TOLERANCE, check_near, verdict

SAMPLES = 16  # most samples of a synthetic map


def failure(fused: FusedBlocks, x: Tensor, options: Options, trains: bool) -> str | None:
    """Return the reason why kernels must not run a group on its map `x`, or None if they may.

    `trains` says whether anything in the group needs a gradient. Raises `InputError` if a kernel
    has broken the process's CUDA context.
    """
    if options.ops is not kernels or not _runs_kernels(x):
        return None
    dtypes = [tensor.dtype for tensor in fused.tensors if tensor is not None]
    widths = [fused.tensors[index].shape for index in fused.weights]
    # pools and blurs treat a last odd pixel apart; a blur refuses a side of 1
    parity = [min(side, 2 + side % 2) for side in x.shape[2:]]
    settings = x.device, trains, options.recomputes, fused.padded, fused.dtype
    key = (*settings, *fused.blocks, *dtypes, *widths, *parity, *_kernels_of_se(fused, x))
    # the gradient behind the statistics of two values is 0: a stage halves the map to 16 or more
    samples = min(max(len(x), 2, 64 // x[0, 0].numel()), SAMPLES)
    shape = torch.Size((samples, *x.shape[1:]))

    def compare() -> None:
        if x.is_cuda:
            _compile(launches_of(fused, shape, options, trains), x.device)
        run(fused, shape, options._replace(ops=checked_ops(fused.dtype)), trains)

    return verdict(key, x.device, compare)


def _kernels_of_se(fused: FusedBlocks, x: Tensor) -> Iterator[bool]:
    """Yield whether each SE is one kernel, on maps of the size of `x` and of half of it."""
    for epilogue in (layer.epilogue for block in fused.blocks for layer in block.layers):
        if epilogue.se is not None:
            reduced, channels = fused.tensors[epilogue.se.fc1_weight].shape[:2]
            channels += -channels % 8 if fused.padded else 0
            for size in (x.shape[2:], blurred(x.shape)):
                yield kernels.passes.fits_one_program(channels, size, reduced)


def stem_failure(x: Tensor, block_size: int, dtype: torch.dtype) -> str | None:
    """Return the reason why `stem_input` must not run its kernel on images `x`, or None."""
    if not _runs_kernels(x):
        return None

    def compare() -> None:
        images = torch.randint_like(x[:SAMPLES], 256)
        result = stem_input(images, block_size, dtype, kernels=True)
        exact = stem_input(images, block_size, torch.float32, kernels=False)
        check_near("stem_input", result, exact, TOLERANCE[dtype])

    return verdict((x.device, block_size, dtype, x.shape[1], x.stride(1) == 1), x.device, compare)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and not isinstance(x, FakeTensor)


def run(fused: FusedBlocks, shape: torch.Size, options: Options, trains: bool) -> None:
    """Run the group on a synthetic map (N, C, H, W); if `trains`, compute all gradients too."""
    fused = _with_random_parameters(fused)
    weight = fused.tensors[fused.weights[0]]
    x = torch.empty(shape, dtype=fused.dtype, device=weight.device)
    x = x.contiguous(memory_format=torch.channels_last)
    fill(x)
    inputs = [tensor for tensor in (x, *fused.tensors) if tensor is not None]
    for tensor in inputs if trains else ():
        tensor.requires_grad_()
    with FrozenRunningStats(), torch.set_grad_enabled(trains):
        y = run_fused(fused, options, [x])
        if trains:
            torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)


def fill(x: Tensor) -> None:
    """Fill a map (N, C, H, W): per channel, 1 to 1.5 and -1 to -1.5 equally often, plus an offset.

    With the gammas and betas of `_with_random_parameters`, no value is then near the kink of the
    leaky ReLU behind a norm, where rounding would decide its slope. No sum over pixels cancels.
    """
    count, channels = x.numel() // x.shape[1], torch.arange(x.shape[1], device=x.device)
    signs = torch.randperm(count, device=x.device)[:, None] % 2 * 2 - 1  # [pixels, 1]
    signs = signs * (1 - channels % 2 * 2)  # [pixels, channels]
    values = signs * torch.empty(signs.shape, device=x.device).uniform_(1, 1.5)
    offset = (channels % 7 - 3.5) / 10  # up to 0.35, and never 0
    pixels = x.permute(0, 2, 3, 1)
    pixels.copy_((values + offset).view(pixels.shape))


def _with_random_parameters(fused: FusedBlocks) -> FusedBlocks:
    """Replace parameters and running statistics: gammas near 1 or -1, others in proportion."""
    tensors = list[Any](fused.tensors)
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            bound = 1 / 16 if tensor.dim() == 1 else (3 / tensor[0].numel()) ** 0.5
            tensors[index] = torch.empty_like(tensor, requires_grad=False).uniform_(-bound, bound)
    gammas = (layer.epilogue.gamma for block in fused.blocks for layer in block.layers)
    for gamma in {*gammas} - {None}:
        tensors[gamma] += tensors[gamma].sign()
    eval_norms = [
        norm._replace(module=_statistics(fused.tensors[norm.gamma], norm.module.eps))
        for norm in fused.eval_norms
    ]
    return fused._replace(tensors=tensors, eval_norms=eval_norms)


def _statistics(gamma: Tensor, eps: float) -> Any:
    """Return a stand-in for a norm in eval mode, with random running statistics."""
    mean, var = (torch.empty_like(gamma, requires_grad=False) for _ in range(2))
    return SimpleNamespace(
        running_mean=mean.uniform_(-1 / 16, 1 / 16), running_var=var.uniform_(1, 2), eps=eps
    )


def launches_of(
    fused: FusedBlocks, shape: torch.Size, options: Options, trains: bool
) -> list[Launch]:
    """Return the launches of `run`, recorded with fake tensors."""
    with recorded_launches() as launches, FakeTensorMode(allow_non_fake_inputs=True):
        run(fused, shape, options, trains)
    return launches


def _compile(launches: Iterable[Launch], device: torch.device) -> None:
    """Compile the kernels of launches, in parallel, unless Triton's cache has them."""

    def compile_one(launch: Launch) -> None:
        # for a dtype, Triton assumes an address divisible by 16, as those of a GPU's allocator are
        arguments = [x.dtype if isinstance(x, Tensor) else x for x in launch.arguments.values()]
        with torch.cuda.device(device):
            launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, {one.variant(): one for one in launches}.values()))


def checked_ops(dtype: torch.dtype) -> Any:
    """Return functions of `epilogue` that raise `ArithmeticError` if `definition` differs.

    `dtype` is that of the maps. For float32, definitions compute in float64, else in float32. The
    values of convolutions' outputs, and of the gradients of norms' outputs, are replaced by `fill`.
    """
    wide = torch.float64 if dtype == torch.float32 else torch.float32

    def exact(value: Any) -> Any:
        if isinstance(value, Saved) and value.mask is not None:
            value = value._replace(mask=unpacked_mask(value.mask, value.y))
        return tree_map_only(Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, value)

    def run(name: str, *args: Any, **rest: Any) -> Any:
        synthetic = {"forward": args[:1], "gradient_sums": args[:2]}.get(name, ())
        for values in synthetic:
            if values is not None:  # there may be no second gradient
                fill(values)
        wide_rest = {key: exact(part) for key, part in rest.items()}
        expected = getattr(definition, name)(*map(exact, args), **wide_rest)
        results = getattr(kernels, name)(*args, **rest)
        check_near(name, results, expected, TOLERANCE[dtype])
        if name == "forward" and results[1].mask is not None:
            out, saved = results
            if not torch.equal(unpacked_mask(saved.mask, out), ~(out <= 0)):
                raise ArithmeticError("forward: the mask differs from the sign of the output")
        return results

    return SimpleNamespace(**{name: functools.partial(run, name) for name in definition.__all__})


def unpacked_mask(mask: Tensor, y: Tensor) -> Tensor:
    """Convert the ReLU mask that `passes.apply` wrote to booleans in the shape of `y`."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(2)[..., : y.shape[1]].bool().mT.reshape(y.shape)
