"""Comparison of a group's kernels with their definitions, at the group's first use on a GPU.

The first `SAMPLES` samples of the user's own map run through the group once more, forward and, if
anything is trained, backward. Each operation between two convolutions then runs twice on equal
tensors: by kernels, and by its definition in plain PyTorch. The results must agree within rounding.
Otherwise plain modules run the group from then on. Later calls of groups with equal settings,
dtypes and widths find the result in a dictionary. Each process compares on its own GPU.

Nothing that the user sees changes: no running statistics, gradients or random numbers. Weights are
the user's own, but gammas, betas and biases vary. A new model has gammas of 0, behind which all
gradients would be 0, and wrong ones would not show.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tresnet.errors import InputError
from tresnet.fused.block_specs import FusedBlocks
from tresnet.fused.execution import run_fused
from tresnet.fused.stage import Options
from tresnet.layers.norm import FrozenRunningStats
from tresnet.ops import epilogue as kernels
from tresnet.ops.epilogue import Epilogue, Saved, definition
from tresnet.ops.launching import Launch, recorded_launches
from tresnet.ops.stem import stem_input

SAMPLES = 16
# Largest error allowed for a dtype, relative to the largest expected value. The limits for 16 bits
# allow for two roundings of a result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Results may be further off by so many times the effect of changes in the last bit of the inputs.
MOVES = 16
# Texts of the errors of PyTorch's allocator, of Triton and of cuBLAS.
_SHORT_OF_MEMORY = "out of memory", "ALLOC_FAILED"
_failures: dict[Any, str | None] = {}  # None if the kernels are right
_lock = threading.RLock()  # a comparison changes flags of the whole process


def failure(fused: FusedBlocks, x: Tensor, options: Options, trains: bool) -> str | None:
    """Return the reason why kernels must not run a group on its map `x`, or None if they may.

    `trains` says whether anything in the group needs a gradient. Raises `InputError` if a kernel
    has broken the process's CUDA context.
    """
    if options.ops is not kernels or not _runs_kernels(x):
        return None
    dtypes = [tensor.dtype for tensor in fused.tensors if tensor is not None]
    widths = [fused.tensors[index].shape for index in fused.weights]
    parity = [side % 2 for side in x.shape[2:]]  # pools and blurs treat a last odd pixel apart
    settings = x.device, trains, options.recomputes, fused.padded, fused.dtype
    key = (*settings, *fused.blocks, *dtypes, *widths, *parity)

    def compare() -> None:
        samples = x.detach()[:SAMPLES]
        if x.is_cuda:
            _compile(launches_of(fused, samples, options, trains), x.device)
        run(fused, samples, options._replace(ops=checked_ops(fused.dtype)), trains)

    return _first_failure(key, x, compare)


def stem_failure(x: Tensor, block_size: int, dtype: torch.dtype) -> str | None:
    """Return the reason why `stem_input` must not run its kernel on images `x`, or None."""
    if not _runs_kernels(x):
        return None

    def compare() -> None:
        images = x[:SAMPLES]
        result = stem_input(images, block_size, dtype, kernels=True)
        exact = stem_input(images, block_size, torch.float32, kernels=False)
        _compare("stem_input", result, exact, exact, TOLERANCE[dtype])

    return _first_failure((x.device, block_size, dtype, x.shape[1], x.stride(1) == 1), x, compare)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and not isinstance(x, FakeTensor)


def _first_failure(key: Any, x: Tensor, compare: Callable[[], None]) -> str | None:
    """Return the reason if `compare` raises an error at the first call with this key."""
    if key in _failures:
        return _failures[key]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        if key not in _failures:
            _failures[key] = _reason(x.device, compare)
            if x.is_cuda:
                torch.cuda.empty_cache()  # reserved memory stays that of the user's own steps
        return _failures[key]


def _reason(device: torch.device, compare: Callable[[], None]) -> str | None:
    try:
        with _undisturbed(device):
            compare()
    except InputError:
        raise  # the user's map is wrong, which says nothing about the kernels
    except Exception as error:  # compilers, linkers and drivers raise errors of any type
        text = (str(error).strip() or "no message").splitlines()[-1]
        if any(words in str(error) for words in _SHORT_OF_MEMORY):
            return None  # this says nothing either, and plain modules need more memory
        if _is_broken(device):
            raise InputError(
                f"a Triton kernel has broken this process's use of {device} ({text}): start "
                "the process again with impl='plain'"
            ) from error
        return f"its first use on {device} failed ({type(error).__name__}: {text})"
    return None


def _is_broken(device: torch.device) -> bool:
    """Return whether the CUDA context is unusable, as after an illegal address."""
    try:
        torch.ones(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Context in which no mode, hook or generator of the user sees what runs.

    cuDNN's search for fast algorithms is off, because it would take longer than the comparison.
    PyTorch would keep the algorithms that are taken instead, for the user's convolutions of these
    shapes, unless they differ in being deterministic. PyTorch's own deterministic algorithms are
    off, because a definition has no such variant.
    """
    cudnn: Any = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic
    hooked = _top_saved_tensors_default_hooks(False) is not None
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        FrozenRunningStats(),
        _disable_current_modes(),
        saved_tensors_hooks(lambda x: x, lambda x: x) if hooked else nullcontext(),
    ):
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark, cudnn.deterministic = False, True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            cudnn.benchmark, cudnn.deterministic = before


def run(fused: FusedBlocks, x: Tensor, options: Options, trains: bool) -> None:
    """Run the group on `x` with varied parameters; if `trains`, compute all gradients too."""
    leaves = [None if t is None else _varied(t) for t in fused.tensors]
    inputs = [leaf for leaf in (x, *leaves) if leaf is not None]
    for leaf in inputs if trains else ():
        leaf.requires_grad_()
    with torch.set_grad_enabled(trains):
        y = run_fused(fused._replace(tensors=leaves), options, [x])
        if trains:
            grad = _pattern(y.numel(), y.device).view(y.shape).to(y.dtype)
            torch.autograd.grad(y, inputs, grad, allow_unused=True)


def _varied(tensor: Tensor) -> Tensor:
    """Detach a tensor; change each value of a vector by up to 3 / 8."""
    tensor = tensor.detach()
    if tensor.dim() != 1:
        return tensor
    change = _pattern(len(tensor), tensor.device).to(tensor.dtype)
    return torch.where(tensor == 0, change, tensor * (1 + change))


def _pattern(count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) % 7 - 3) / 8


def launches_of(fused: FusedBlocks, x: Tensor, options: Options, trains: bool) -> list[Launch]:
    """Return the launches of `run`, recorded with fake tensors."""
    with recorded_launches() as launches, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(fused, mode.from_tensor(x), options, trains)
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

    `dtype` is that of the maps. For float32, definitions compute in float64, else in float32.
    """
    wide = torch.float64 if dtype == torch.float32 else torch.float32

    def exact(value: Any) -> Any:
        if isinstance(value, Saved) and value.mask is not None:
            value = value._replace(mask=unpacked_mask(value.mask, value.y))
        return tree_map_only(Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, value)

    def run(name: str, *args: Any, **rest: Any) -> Any:
        if name == "forward" and rest["saves"]:
            y, epilogue = args
            for _ in range(2):  # the statistics, and so the kink, move a little with the values
                y = _off_the_kink(y, exact(y), exact(epilogue))
            args = y, epilogue
        define = getattr(definition, name)
        inputs = [*map(exact, args)], {key: exact(part) for key, part in rest.items()}
        moved_args, moved_rest = tree_map_only(Tensor, _moved, inputs)
        expected, moved = define(*inputs[0], **inputs[1]), define(*moved_args, **moved_rest)
        results = getattr(kernels, name)(*args, **rest)
        _compare(name, results, expected, moved, TOLERANCE[dtype])
        if name == "forward" and results[1].mask is not None:
            out, saved = results
            if not torch.equal(unpacked_mask(saved.mask, out), ~(out <= 0)):
                raise ArithmeticError("forward: the mask differs from the sign of the output")
        return results

    return SimpleNamespace(**{name: functools.partial(run, name) for name in definition.__all__})


def _off_the_kink(y: Tensor, exact: Tensor, epilogue: Epilogue) -> Tensor:
    """Change values of `y` near the kink of the leaky ReLU: rounding decides their slope there.

    `exact` and `epilogue` are `y` and its epilogue in the dtype of the definitions.
    """
    if epilogue.slope is None:
        return y
    stats, beta = definition.forward(exact, epilogue)[1].stats, epilogue.beta[:, None, None]
    assert stats is not None  # folded norms save nothing
    mean, scale = stats[:2, :, None, None]
    # (y - mean) * scale + beta is rounded three times, by a 2^24-th of the terms each
    rounding = 1e-6 * ((exact.abs() + mean.abs()) * scale.abs() + beta.abs())
    near = ((exact - mean) * scale + beta).abs() < rounding
    return torch.where(near, y + y.abs().amax() / 16, y)


def _moved(x: Tensor) -> Tensor:
    """Change each value of floats by up to twice the rounding of float32, at random."""
    return x * (1 + torch.empty_like(x).uniform_(-(2**-23), 2**-23)) if x.is_floating_point() else x


def unpacked_mask(mask: Tensor, y: Tensor) -> Tensor:
    """Convert the ReLU mask that `passes.apply` wrote to booleans in the shape of `y`."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(2)[..., : y.shape[1]].bool().mT.reshape(y.shape)


def _compare(name: str, result: Any, expected: Any, moved: Any, tolerance: float) -> None:
    """Raise `ArithmeticError` unless results are near; statistics are compared row by row.

    `moved` is what the definition gives for inputs that `_moved` has changed. If sums cancel, as
    those of equal images do, it differs by more than the tolerance, and results may differ as much.
    Where the definition gives None, only the kernels need a value. Where the expected value is no
    finite number of the result's dtype, any result is right.
    """
    if isinstance(expected, tuple):
        parts = _parts(result), _parts(expected), _parts(moved)
        for part, expected_part, moved_part in zip(*parts, strict=True):
            _compare(name, part, expected_part, moved_part, tolerance)
    elif expected is not None and expected.is_floating_point():
        if result is None:
            raise ArithmeticError(f"{name}: a result is missing")
        finite = expected.to(result.dtype).isfinite()
        error, rounding, size = (
            x.where(finite, 0.0).abs().amax().item()  # waits for the GPU
            for x in (result - expected, moved - expected, expected)
        )
        allowed = tolerance * size + MOVES * rounding + 1e-12
        if not error <= allowed:  # NaN fails too
            raise ArithmeticError(f"{name}: off by {error:.3g}, expected at most {allowed:.3g}")


def _parts(results: tuple[Any, ...]) -> list[Any]:
    """Return a list of results, with the four statistics apart, because these differ in size."""
    if isinstance(results, Saved) and results.stats is not None:
        return [*results.stats, *results._replace(stats=None)]
    return [*results]
