"""Comparison of a model's Triton kernels with their definitions in plain PyTorch.

A `Subject` holds a model's stem and stages on the meta device, and an image size. `compare` copies
these modules to the GPU with random weights. The copies run training steps, inference, and a
backward pass in eval mode, on uint8 and on float images. Each operation between two convolutions
runs twice on equal tensors: by kernels, and by its PyTorch definition in float64. The results must
agree within rounding. So each kernel that the model launches for that image size is compared, with
the same `constexpr` arguments. Kernels with the tile sizes of other image sizes are not compared.
"""

import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tresnet.fused.run import UncheckedRunner
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.models.tresnet import Child
from tresnet.ops import abn
from tresnet.ops.abn import Norm, Saved, SEWeights, Sums, reference
from tresnet.ops.launching import Launch, recorded_launches
from tresnet.ops.space_to_depth import stem_input

# Largest error allowed for a dtype, relative to the largest expected value. The limits for 16 bits
# allow for two roundings of a result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCHES = 2, 16  # tile sizes of small maps differ between few and many samples
DEPTH = 3  # later blocks with equal settings launch the kernels of a stage's third block


class Subject(NamedTuple):
    """Copies of modules on the meta device, and the shape of their images."""

    text: str  # a description of the modules and their settings
    children: Sequence[Child]
    shape: tuple[int, ...]
    dtype: torch.dtype


def describe(children: Sequence[Child], x: Tensor, dtype: torch.dtype) -> Subject:
    """Return the `Subject` of named modules for images `x` (N, C, H, W) and maps in `dtype`."""
    few = [(n, _few(child) if type(child) is nn.Sequential else child) for n, child in children]
    memo: dict[int, Any] = {}
    copies = [(name, _bare(child, memo)) for name, child in few]
    text = "\n".join(f"{name} {_text(child)}" for name, child in few)
    return Subject(text, copies, tuple(x.shape[1:]), dtype)


def _few(stage: nn.Sequential) -> nn.Sequential:
    """Reduce a stage to its first `DEPTH` blocks, and to blocks that equal no earlier block."""
    texts = [*map(_text, stage)]
    selected = [i for i, text in enumerate(texts) if i < DEPTH or text not in texts[:i]]
    return stage if len(selected) == len(stage) else nn.Sequential(*(stage[i] for i in selected))


def _text(module: nn.Module) -> str:
    tensors = *module.parameters(), *module.buffers()
    return f"{module} {[tensor.dtype for tensor in tensors]}"


def _bare(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module to the meta device; the copy has no hooks, and the `forward` of its class.

    Attributes other than tensors are shared with the original, because some cannot be copied.
    """
    if id(module) in memo:
        return memo[id(module)]
    copied = memo[id(module)] = module.__new__(type(module))
    copied.__dict__.update(vars(module) | vars(nn.Module()))
    for name in ("forward", "_conv_forward", "_compiled_call_impl"):
        copied.__dict__.pop(name, None)
    for name, child in module._modules.items():
        copied._modules[name] = child and _bare(child, memo)
    for kind in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[kind].items():
            if tensor is not None and id(tensor) not in memo:
                meta = torch.empty_like(tensor, device="meta", requires_grad=False)
                memo[id(tensor)] = nn.Parameter(meta) if isinstance(tensor, nn.Parameter) else meta
            vars(copied)[kind][name] = None if tensor is None else memo[id(tensor)]
    return copied


def compare(subject: Subject, device: torch.device) -> None:
    """Run the modules of `subject` on `device`, and compare kernels with their definitions.

    Raises:
        ArithmeticError: a kernel's result differs from its definition by more than rounding.
        Exception: a kernel cannot be compiled or launched.
    """
    ops = checked_ops(TOLERANCE[subject.dtype])
    if device.type != "cuda":
        run(subject, ops, device)
        return
    variants = {launch.variant(): launch for launch in launches_of(subject)}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_compile, variants.values()))
    run(subject, ops, device)
    compare_large(device)


def run(subject: Subject, ops: Any, device: torch.device) -> None:
    """Run the modules of `subject` with random values, in training, eval and inference mode."""
    memo: dict[int, Any] = {}
    children = [(name, _bare(child, memo)) for name, child in subject.children]
    random = torch.Generator().manual_seed(0)
    for _, child in children:
        _fill(child, device, random)
    folded = any(isinstance(m, FoldedConv) for _, child in children for m in child.modules())
    modes = ("inference",) if folded else ("training", "eval", "inference")

    def run_modes(part: list[Child], x: Tensor) -> Tensor:
        runs = itertools.product(("activations", "none"), modes)
        return [_run_mode(part, x, ops, *options, subject.dtype) for options in runs][-1]

    stem = [child for child in children if not isinstance(child[1], nn.Sequential)]
    for batch in BATCHES:
        images = torch.randint(256, (batch, *subject.shape), generator=random, dtype=torch.uint8)
        images = images.to(device)
        run_modes(children, (images / 255).to(subject.dtype))
        if stem:  # the stem also reads uint8 images
            _check_stem_input(stem, images, ops, subject.dtype)
            run_modes(stem, images)


def _check_stem_input(stem: Sequence[Child], x: Tensor, ops: Any, dtype: torch.dtype) -> None:
    if x.dtype == torch.uint8 and ops is not abn and isinstance(stem[0][1], SpaceToDepth):
        size = stem[0][1].block_size
        result = stem_input(x, size, dtype, kernels=True)
        exact = stem_input(x, size, torch.float64, kernels=False)
        _check("stem_input", result, exact, TOLERANCE[dtype])


def _run_mode(
    children: list[Child], x: Tensor, ops: Any, recompute: Any, mode: str, dtype: torch.dtype
) -> Tensor:
    class Checked(UncheckedRunner):
        def ops(self, x: Any, weight: Tensor) -> Any:
            return ops

    name, trains = children[-1][0], mode != "inference"
    for _, child in children:
        if mode == "training":
            child.train()
        else:
            child.eval()
    weight = next(p for _, child in children for p in child.parameters())
    with (
        warnings.catch_warnings(action="ignore"),  # warnings that modules are not fused
        torch.set_grad_enabled(trains),
        torch.autocast(x.device.type, dtype, enabled=weight.dtype != dtype),
    ):
        y = Checked("auto", recompute)(children, x, (name,))[name]
    if trains:
        y.backward((torch.arange(y.numel(), device=y.device) % 7 - 3).view(y.shape).to(y.dtype))
    return y.detach()


def _fill(module: nn.Module, device: torch.device, random: torch.Generator) -> None:
    """Replace the module's meta tensors by random tensors on `device`."""
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, meta in tensors.items():
                if meta is None:
                    continue
                values = torch.zeros(meta.shape)
                if meta.is_floating_point():
                    values = torch.randn(meta.shape, generator=random)
                if meta.dim() > 1:
                    values *= (2 / values[0].numel()) ** 0.5
                if name == "running_var":
                    values = values.abs() + 0.5
                tensor: Any = torch.empty_like(meta, device=device).copy_(values)
                tensors[name] = nn.Parameter(tensor) if isinstance(meta, nn.Parameter) else tensor


def launches_of(subject: Subject) -> list[Launch]:
    """Return the kernel launches of a check of `subject`, recorded with fake tensors."""
    with recorded_launches() as launches, FakeTensorMode(allow_non_fake_inputs=True):
        run(subject, abn, torch.device("cpu"))
    return launches


def _compile(launch: Launch) -> None:
    # Triton compiles for addresses divisible by 16, such as 0 and those of a GPU's allocator
    arguments = {
        name: SimpleNamespace(dtype=value.dtype, data_ptr=lambda: 0)
        if isinstance(value, Tensor)
        else value
        for name, value in launch.arguments.items()
    }
    launch.kernel.warmup(**arguments, grid=launch.grid, **launch.options)


def checked_ops(tolerance: float) -> Any:
    """Return functions of `abn` that raise `ArithmeticError` if `reference` gives other results."""

    def check(name: str, results: Iterable[Any], expected: Iterable[Any]) -> None:
        for result, definition in zip(results, expected, strict=True):
            if (result is None) != (definition is None):
                raise ArithmeticError(f"{name}: the kernels or the definition returned None")
            if result is not None:
                _check(name, result, definition, tolerance)

    def forward(y: Tensor, norm: Norm, **rest: Any) -> tuple[Tensor, Saved]:
        out, saved = abn.forward(y, norm, **rest)
        expected, exact = reference.forward(_exact(y), _exact(norm), **_exact(rest))
        check("the output", [out], [expected])
        check("tensors for backward", saved[1:-1], exact[1:-1])
        if saved.mask is not None and not torch.equal(unpacked(saved.mask, out), ~(out <= 0)):
            raise ArithmeticError("the mask differs from the sign of the output")
        return out, saved

    def rebuild(norm: Norm, saved: Saved) -> Tensor:
        out = abn.rebuild(norm, saved)
        check("the recomputed output", [out], [reference.rebuild(_exact(norm), _exact(saved))])
        return out

    def gradient_sums(grad: Tensor, second: Any, norm: Norm, saved: Saved, **rest: Any) -> Sums:
        sums = abn.gradient_sums(grad, second, norm, saved, **rest)
        exact = reference.gradient_sums(*map(_exact, (grad, second, norm, saved)), **rest)
        check("gradients of parameters", sums.grads, exact.grads)
        check("the masked gradient and the recomputed output", sums[1:3], exact[1:3])
        return sums

    def gradient(grad: Tensor, norm: Norm, saved: Saved, sums: Sums) -> Tensor:
        result = abn.gradient(grad, norm, saved, sums)
        exact = reference.gradient(*map(_exact, (grad, norm, saved, sums)))
        check("the gradient", [result], [exact])
        return result

    functions = forward, rebuild, gradient_sums, gradient
    return SimpleNamespace(**{function.__name__: function for function in functions})


def _exact(value: Any) -> Any:
    """Convert tensors of `value` to float64, and a ReLU mask of bits to booleans."""
    if isinstance(value, Saved) and value.mask is not None:
        value = value._replace(mask=unpacked(value.mask, value.y))
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, value)


def unpacked(mask: Tensor, y: Tensor) -> Tensor:
    """Convert the ReLU mask that `launch.apply` wrote to booleans in the shape of `y`."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(2)[..., : y.shape[1]].bool().mT.reshape(y.shape)


def _check(name: str, result: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise `ArithmeticError` unless `result` is near `expected`; (4, C) is compared row by row."""
    rows = (1,) if expected.dim() == 2 and len(expected) == 4 else tuple(range(expected.dim()))
    error = (result.double() - expected).abs().amax(rows)
    allowed = tolerance * expected.abs().amax(rows) + 1e-12
    if not bool((error <= allowed).all()):  # NaN fails too; `bool` waits for the GPU
        worst = f"off by {error.max().item():.3g}, expected at most {allowed.max().item():.3g}"
        raise ArithmeticError(f"{name}: {worst}")


def compare_large(device: torch.device) -> None:
    """Check the kernels on a map of over 2^31 values, if twice the needed memory is free.

    The map repeats a few samples. Each repetition must have the results of these samples alone.
    """
    shape = 4, 64, 56, 56
    copies = 2**31 // torch.Size(shape).numel() + 1
    need_bytes = 8 * 2 * copies * torch.Size(shape).numel()  # for eight maps in 16 bits
    if torch.cuda.mem_get_info(device)[0] < 2 * need_bytes:
        return
    few = torch.randn(shape, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
    se = SEWeights(*(torch.randn(n, device=device) / 8 for n in ((64, 64), (64,)) * 2))
    gamma, beta = torch.rand(2, 64, device=device) + 0.5
    norm = Norm(gamma, beta, slope=1e-3, se=se)
    expected: Any = None
    for count in (1, copies):
        x = torch.cat([few] * count)
        out, saved = abn.forward(x, norm, saves=True)
        sums = abn.gradient_sums(x, None, norm, saved, rebuilds=True)
        results: Any = out, sums.rebuilt, abn.gradient(x, norm, saved, sums)
        expected = expected or [part.double() for part in results]
        for part, definition in zip(results, expected, strict=True):
            for samples in part.split(4):
                _check("a large map", samples, definition, TOLERANCE[torch.bfloat16])
