"""The fused kernels against plain PyTorch in fp64: outputs, gradients, running statistics."""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.ops import plain
from tests.ops.kernels import DEVICE, poisoned_memory  # noqa: F401
from tests.ops.operation import run_both_ways
from tresnet.errors import InputError
from tresnet.fused.block_specs import EvalNorm
from tresnet.fused.execution import eval_stats, update_running_stats
from tresnet.fused.first_use import unpacked_mask
from tresnet.layers.norm import ABN
from tresnet.ops import epilogue as kernels
from tresnet.ops import tiles
from tresnet.ops.epilogue import Epilogue, Saved, SEWeights, definition, passes


@dataclass(frozen=True)
class Chain:
    """Operations after the normalisation."""

    slope: float | None = 1e-3
    blur: bool = False
    se: bool = False
    join: bool = False


CHAINS = {
    "abn": Chain(1e-2),
    "identity": Chain(None),
    "blur": Chain(blur=True),
    "se": Chain(se=True),
    "blur_se": Chain(blur=True, se=True),
    "se_join": Chain(None, se=True, join=True),
    "join": Chain(None, join=True),
    "negative": Chain(-0.5),  # not invertible: in place, PyTorch refuses its gradient
    "active_join": Chain(0.3, join=True),
    "active_se_join": Chain(0.3, se=True, join=True),
}
SHAPES = {
    "odd": (3, 5, 7, 4),
    "width_of_xl": (1, 83, 9, 11),
    "smallest_blur": (2, 3, 2, 2),
    "even": (2, 16, 6, 8),
    "one_sample": (1, 6, 4, 3),
    "one_pixel": (7, 6, 1, 1),
    "one_channel": (3, 1, 5, 4),
    "one_column": (3, 6, 5, 1),
    "wide": (3, 259, 3, 2),  # each program of `apply` merges the moments
}
HIDDEN = {  # shapes, and numbers of hidden units of an SE
    "se_of_t": ((1, 16, 3, 2), 64),
    "se_of_xl": ((17, 83, 2, 1), 64),  # one sample more than a program covers
    "se_of_166": ((2, 332, 2, 2), 166),
    "se_of_blocks": ((5, 40, 2, 1), 300),  # blocks of hidden units
}


def tensors(shape, chain, dtype=torch.float32, gamma=1.0, reduced=5):
    """Inputs on the kernels' device: activations off centre, gammas of both signs, one zero."""
    channels = shape[1]
    x = (torch.randn(shape) * 2 + 3).to(dtype, memory_format=torch.channels_last)
    weight, bias = torch.randn(2, channels) * torch.tensor([[gamma], [1.0]])
    weight[0] = 0
    parts = {"x": x, "weight": weight, "bias": bias}
    if chain.se:
        sizes = {"fc1": (reduced, channels), "fc1_bias": (reduced,)}
        sizes |= {"fc2": (channels, reduced), "fc2_bias": (channels,)}
        parts |= {name: torch.randn(size) / max(2, size[-1] ** 0.5) for name, size in sizes.items()}
    if chain.join:
        parts["shortcut"] = torch.randn(shape).to(dtype, memory_format=torch.channels_last)
    return {name: part.to(DEVICE) for name, part in parts.items()}


def run(parts, chain, impl, training=True, dtype=None):
    """Return the output, all gradients, and the running statistics afterwards.

    By the kernels ('triton'), by their definitions, or by PyTorch's operators ('reference').
    """
    leaves = [p.to(dtype or p.dtype, copy=True).requires_grad_() for p in parts.values()]
    x, weight, bias, *layers = leaves
    shortcut = layers.pop() if chain.join else None
    se, generator = SEWeights(*layers) if chain.se else None, torch.Generator().manual_seed(1)
    epilogue = Epilogue(weight, bias, se=se, slope=chain.slope, blur=chain.blur)
    module = ABN(len(weight), device=DEVICE, dtype=weight.dtype)
    module.weight.data = weight.detach()
    running = module.running_mean, module.running_var
    running[0].copy_(torch.randn(len(weight), generator=generator))
    running[1].copy_(torch.rand(len(weight), generator=generator) + 0.5)

    def grad_of(y):
        grad = torch.randn(y.shape, generator=generator).bfloat16()  # the same in every dtype
        return grad.to(DEVICE, y.dtype)

    if impl == "reference":
        y = plain(x, epilogue, shortcut, running, training)
        grads = torch.autograd.grad(y, leaves, grad_of(y))
    else:
        with torch.no_grad():
            epilogue = epilogue._replace(
                stats=None if training else eval_stats([EvalNorm(0, 0, module)], [module.weight])[0]
            )
            ops = kernels if impl == "triton" else definition
            y, grads, stats = run_both_ways(ops, x, epilogue, shortcut, grad_of)
            update_running_stats([module] if training else [], [stats] if training else [])
    names = ["y", *(f"grad of {name}" for name in parts), "running mean", "running var"]
    return dict(zip(names, [y.detach(), *grads, *running], strict=True))


def assert_equal(ours, exact, tolerance=1e-5):
    for name, value in exact.items():
        scale = value.abs().max().item() + 1e-9
        error = (ours[name].double() - value).abs().max().item() / scale
        assert error <= tolerance, f"{name} is off by {error:.1e} of its largest value"
        assert not ours[name].isnan().any(), name


# Every chain, every shape with and without a blur, and maps whose strides have several readings.
EQUAL = [
    *((shape, chain) for shape in ("odd", "width_of_xl", "smallest_blur", "even")
      for chain in ("blur_se", "se_join")),
    *(("odd", chain) for chain in CHAINS),
    ("even", "abn"), ("wide", "abn"), ("wide", "active_join"),
    *((shape, "se_join") for shape in ("one_sample", "one_pixel", "one_channel", "one_column")),
    *((shape, "blur_se") for shape in ("one_sample", "one_channel")),
    *((shape, chain) for shape in HIDDEN for chain in ("se", "se_join")),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "chain"), dict.fromkeys(EQUAL))
def test_equals_plain_pytorch_in_fp64(shape, chain):
    size, reduced = HIDDEN.get(shape) or (SHAPES[shape], 5)
    parts = tensors(size, CHAINS[chain], reduced=reduced)
    for training in (False, True):
        exact = run(parts, CHAINS[chain], "reference", training, torch.float64)
        definitions = run(parts, CHAINS[chain], "definitions", training, torch.float64)
        assert_equal(definitions, exact, 1e-12)
    ours = run(parts, CHAINS[chain], "triton")
    assert_equal(ours, exact)
    for name in ("y", "grad of x"):
        assert ours[name].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of inf * 0
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_eval_mode_is_pytorchs_and_as_finite_where_x_is_not(chain):
    """Running statistics do not depend on x: infinity in it is no factor of its gradient."""
    parts = tensors((2, 4, 4, 4), chain)
    parts["x"][0, 2, 1, 1], parts["x"][1, 3, 0, 2] = float("inf"), -float("inf")
    exact = run(parts, chain, "reference", training=False)
    ours = run(parts, chain, "triton", training=False)
    for name, value in exact.items():
        assert torch.equal(ours[name].isfinite(), value.isfinite()), name
        finite = value.isfinite()
        torch.testing.assert_close(ours[name][finite], value[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "chain", "reduced", "se_map"),
    [
        ((18, 40, 3, 2), "se", 35, 0),
        ((18, 40, 3, 2), "se_join", 35, 0),
        ((2, 5, 6, 5), "blur_se", 5, 0),
        ((2, 5, 6, 5), "se_join", 5, 0),
        ((3, 20, 7, 3), "se", 9, passes.SE_MAP),
        ((18, 40, 3, 2), "active_join", 0, 0),
        ((18, 40, 3, 2), "abn", 0, 0),
    ],
)
def test_small_tiles(shape, chain, reduced, se_map, monkeypatch):
    """Several tiles of an SE each way, chunks a sample, tiles a chunk and rounds of a merge."""
    sizes = {"SE_CHANNELS": 16, "SE_HIDDEN": 32, "SE_WEIGHTS_TILE": (16, 16), "MERGE_TILE": 16}
    sizes |= {"SE_MAP": se_map, "SE_MAP_TILE": 128}
    sizes |= {"MERGED_WIDTH": 1, "MERGED_CHUNKS": 2}
    for name, size in {**sizes, "multiprocessors": lambda device: 1}.items():
        monkeypatch.setattr(passes, name, size)
    small = {"_specs": {}, "TILE": 32, "BLUR_TILE": 32, "MERGED_CHANNELS": 16}
    for name, size in small.items():
        monkeypatch.setattr(tiles, name, size)
    torch.manual_seed(1)  # of 0, a hidden unit is 3e-7 off its ReLU's kink
    parts = tensors(shape, CHAINS[chain], reduced=reduced)
    exact = run(parts, CHAINS[chain], "reference", dtype=torch.float64)
    assert_equal(run(parts, CHAINS[chain], "triton"), exact)


@pytest.mark.parametrize(
    ("chain", "gamma", "dtype"),
    [
        (Chain(1e-6), 1e-6, torch.bfloat16),
        (Chain(1e-6), 1.0, torch.float16),
        (Chain(1e-6, blur=True), 1.0, torch.bfloat16),
        (Chain(1e-6, blur=True), 1e-6, torch.float16),
        (Chain(1e-3, se=True), 1.0, torch.bfloat16),
        (Chain(None, se=True, join=True), 1e-6, torch.bfloat16),
        (Chain(None, se=True, join=True), 1.0, torch.float16),
    ],
)
def test_rounds_once_in_16_bits(chain, gamma, dtype):
    """The 16-bit results are off from fp64 as a float32 computation rounded once is, the rest less.

    What eager PyTorch loses in 16 bits is more: it rounds after every operation.
    """
    parts = tensors((4, 16, 9, 7), chain, dtype, gamma)
    exact = run(parts, chain, "reference", dtype=torch.float64)
    ours = run(parts, chain, "triton")
    for name, value in exact.items():
        kind = ours[name].dtype
        assert kind == (dtype if name in ("y", "grad of x", "grad of shortcut") else torch.float32)
        # A unit in the last place of the largest value is eps times it or less: half of it is lost
        # by rounding, all of it by the interpreter, which truncates to bfloat16, and some by sums.
        units = 32 if kind == torch.float32 else 1.02 if DEVICE == "cpu" else 0.51
        info = torch.finfo(kind)
        allowed = info.eps * (units * value.abs().max() + info.smallest_normal)
        assert (ours[name].double() - value).abs().max() <= allowed, name


@pytest.mark.parametrize("impl", ["triton", "definitions"])
@pytest.mark.parametrize(
    ("shape", "chain", "message"),
    [
        ((1, 4, 1, 1), "abn", "more than one value per channel"),
        ((2, 4, 1, 5), "blur", "H and W at least 2"),
    ],
)
def test_maps_that_are_too_small_are_errors(shape, chain, message, impl):
    with pytest.raises(InputError, match=message):
        run(tensors(shape, CHAINS[chain]), CHAINS[chain], impl)


def test_statistics_do_not_cancel():
    """In float32, the sum of squares would lose a variance of 1 about a mean of 1000.

    The corner of a constant image is a pixel far from the mean behind a few convolutions.
    """
    large_mean, far_corner = torch.randn(8, 4, 6, 6) + 1000, torch.randn(4, 3, 64, 64) / 8
    far_corner[:, :, 0, 0] = 1000
    for x, per_sample, tolerance in ((large_mean, False, 1e-5), (far_corner, True, 1e-6)):
        x = x.to(DEVICE, memory_format=torch.channels_last)
        epilogue = Epilogue(*torch.ones(2, x.shape[1], device=DEVICE))
        stats, _ = passes.statistics(x, epilogue, per_sample=per_sample)
        exact = x.double().var((0, 2, 3))
        assert ((stats[3].double() - exact) / exact).abs().max() < tolerance


def test_nan_stays_nan_and_has_a_gradient():
    """Compare with PyTorch's ReLU; a gradient of zero would hide the NaN from a GradScaler."""
    parts = tensors((2, 4, 3, 3), CHAINS["join"])
    parts["shortcut"][0, 1, 2, 2] = float("nan")
    ours, exact = (run(parts, CHAINS["join"], i, training=False) for i in ("triton", "reference"))
    assert torch.equal(ours["y"].isnan(), exact["y"].isnan())
    assert exact["grad of shortcut"][0, 1, 2, 2] != 0
    torch.testing.assert_close(ours["grad of shortcut"], exact["grad of shortcut"], rtol=0, atol=0)
    parts["x"][0, 1, 2, 2] = float("nan")
    assert run(parts, CHAINS["join"], "triton")["y"][:, 1].isnan().all()


@pytest.mark.parametrize("tile", [64, 1 << 16])
def test_a_join_keeps_the_sign_of_each_value_in_a_bit(tile, monkeypatch):
    """Cover widths and images that fill bytes, tiles and chunks or do not, and rounded values."""
    monkeypatch.setattr(tiles, "_specs", {})
    monkeypatch.setattr(tiles, "TILE", tile)
    for shape in ((2, 5, 7, 4), (1, 83, 5, 3), (2, 16, 4, 6), (1, 3, 2, 2), (3, 72, 1, 1)):
        x = (torch.randn(shape) * 1e-7).half().to(DEVICE, memory_format=torch.channels_last)
        x[0, 1, 0, 0] = float("nan")
        epilogue = Epilogue(None, torch.zeros(shape[1], device=DEVICE))
        stats = torch.ones(4, shape[1], device=DEVICE)
        stats[0] = 0
        shortcut, grad = x / 2, torch.randn_like(x)
        y, mask = passes.apply(Saved(x, stats), epilogue, shortcut, needs_mask=True)
        positive = unpacked_mask(mask, x)
        assert torch.equal(positive, (y > 0) | y.isnan())
        assert (y == 0).any()
        assert positive.any()
        saved = Saved(x, stats, mask=mask)
        _, masked, _ = passes.grad_sums(grad, None, saved, epilogue, rebuilds=False)
        assert torch.equal(masked, torch.where(positive, grad, 0))
