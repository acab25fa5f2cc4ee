"""The fused kernels against plain PyTorch in fp64: outputs, gradients, running statistics."""

from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.kernels import DEVICE, LAYOUTS, poisoned_memory  # noqa: F401
from tresnet.errors import InputError
from tresnet.ops import recompute, tiles
from tresnet.ops.abn import Convolution, Settings, SEWeights, abn, fused_abn, launch
from tresnet.ops.excite import launch as excite


@dataclass(frozen=True)
class Chain:
    """What follows the normalisation."""

    slope: float | None = 1e-3
    blur: bool = False
    se: bool = False
    join: bool = False
    conv: bool = False


CONVOLUTION = Convolution(padding=(1, 0))
CHAINS = {
    "abn": Chain(1e-2),
    "identity": Chain(None),
    "blur": Chain(blur=True),
    "se": Chain(se=True),
    "blur_se": Chain(blur=True, se=True),
    "se_join": Chain(None, se=True, join=True),
    "join": Chain(None, join=True),
    "conv": Chain(conv=True),
    "se_conv": Chain(se=True, conv=True),
}
SHAPES = {
    "odd": (3, 5, 7, 4),
    "width_of_xl": (1, 83, 9, 11),
    "smallest_blur": (2, 3, 2, 2),
    "even": (2, 16, 6, 8),
}


def tensors(shape, chain, layout, dtype=torch.float32, gamma=1.0, reduced=5):
    """Inputs on the kernels' device: activations off centre, gammas of both signs, one zero."""
    channels = shape[1]
    x = (torch.randn(shape) * 2 + 3).to(dtype).to(memory_format=LAYOUTS[layout])
    weight, bias = torch.randn(2, channels) * torch.tensor([[gamma], [1.0]])
    weight[0] = 0
    parts = {"x": x, "weight": weight, "bias": bias}
    if chain.se:
        sizes = {"fc1": (reduced, channels), "fc1_bias": (reduced,)}
        sizes |= {"fc2": (channels, reduced), "fc2_bias": (channels,)}
        parts |= {name: torch.randn(size) / 2 for name, size in sizes.items()}
    if chain.join:
        parts["shortcut"] = torch.randn(shape).to(dtype).to(memory_format=LAYOUTS[layout])
    if chain.conv:
        parts["conv"] = torch.randn(6, channels, 3, 2).to(dtype)
    return {name: part.to(DEVICE) for name, part in parts.items()}


def call(leaves, chain, running, impl="triton", training=True, **options):
    """abn on what `tensors` returned."""
    x, weight, bias, *layers = (p for name, p in leaves.items() if name not in ("shortcut", "conv"))
    se, conv = SEWeights(*layers) if chain.se else None, leaves.get("conv")
    if chain.conv and impl == "triton":
        settings = Settings(training, slope=chain.slope, **options)
        return fused_abn(x, weight, bias, running, None, se, settings, CONVOLUTION, conv)[0]
    y = abn(
        x, weight, bias, *running, training=training, slope=chain.slope, blur=chain.blur,
        se=se, shortcut=leaves.get("shortcut"), impl=impl, **options,
    )  # fmt: skip
    return y if conv is None else torch.conv2d(y, conv, None, *CONVOLUTION)


def run(parts, chain, impl, training=True, dtype=None, **options):
    """Return the output, all gradients, and the running statistics afterwards."""
    parts = {name: (p if dtype is None else p.to(dtype)) for name, p in parts.items()}
    leaves = {name: part.detach().clone().requires_grad_() for name, part in parts.items()}
    generator = torch.Generator().manual_seed(1)
    channels, kind = leaves["x"].shape[1], leaves["weight"].dtype
    mean = torch.randn(channels, generator=generator).to(DEVICE, kind)
    var = torch.rand(channels, generator=generator).to(DEVICE, kind) + 0.5
    y = call(leaves, chain, (mean, var), impl, training, **options)
    grad = torch.randn(y.shape, generator=generator).bfloat16()  # the same value in every dtype
    grad = grad.to(DEVICE, parts["x"].dtype)
    grads = torch.autograd.grad(y, list(leaves.values()), grad)
    names = ["y", *(f"grad of {name}" for name in leaves), "running mean", "running var"]
    return dict(zip(names, [y.detach(), *grads, mean, var], strict=True))


def assert_equal(ours, exact, tolerance=1e-5):
    for name, value in exact.items():
        scale = value.abs().max().item() + 1e-9
        error = (ours[name].double() - value).abs().max().item() / scale
        assert error <= tolerance, f"{name} is off by {error:.1e} of its largest value"
        assert not ours[name].isnan().any(), name


# Every chain, with and without a blur in either layout, and every shape.
EQUAL = [
    *((shape, chain, "nhwc") for shape in SHAPES for chain in ("blur_se", "se_join")),
    *(("odd", chain, "nhwc") for chain in CHAINS),
    *(("odd", chain, "nchw") for chain in ("blur_se", "se_join")),
    *(("odd", chain, "nchw") for chain in ("conv", "se_conv")),
    ("width_of_xl", "abn", "nchw"),
    ("smallest_blur", "blur_se", "nchw"),
    ("even", "abn", "nhwc"),
]


@pytest.mark.parametrize(("shape", "chain", "layout"), dict.fromkeys(EQUAL))
def test_equals_plain_pytorch_in_fp64(shape, chain, layout):
    parts = tensors(SHAPES[shape], CHAINS[chain], layout)
    exact = run(parts, CHAINS[chain], "reference", dtype=torch.float64)
    ours = run(parts, CHAINS[chain], "triton")
    assert_equal(ours, exact)
    assert ours["y"].is_contiguous(memory_format=LAYOUTS[layout])
    assert ours["grad of x"].stride() == parts["x"].stride()


@pytest.mark.parametrize("chain", ["se", "se_join"])
def test_an_excitation_of_several_tiles_each_way(chain):
    torch.manual_seed(1)  # of 0, a hidden unit is 3e-7 off its ReLU's kink
    parts = tensors((18, 40, 3, 2), CHAINS[chain], "nhwc", reduced=35)
    exact = run(parts, CHAINS[chain], "reference", dtype=torch.float64)
    assert_equal(run(parts, CHAINS[chain], "triton"), exact)


@pytest.mark.parametrize("se", [False, True], ids=["plain", "se"])
def test_a_join_after_an_activation_whose_output_is_not_kept(se):
    """Backward computes the sign of the sum again, from the activation as forward had it."""
    chain = Chain(0.3, se=se, join=True)
    parts = tensors((3, 6, 5, 4), chain, "nhwc")
    exact = run(parts, chain, "reference", dtype=torch.float64)
    assert_equal(run(parts, chain, "triton", keep_output=False), exact)


@pytest.mark.parametrize("training", [True, False])
def test_parameters_and_statistics_that_are_not_side_by_side(training):
    """Columns of a matrix: read, and the running statistics written, by their strides."""
    x = torch.randn(3, 4, 5, 4, device=DEVICE) + 1
    values = torch.rand(4, 4).to(DEVICE) + 0.5
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        columns = values.to(dtype, copy=True).requires_grad_()
        running = values.to(dtype, copy=True)
        y = abn(
            x.to(dtype), columns[:, 0], columns[:, 1], running[:, 2], running[:, 3],
            training=training, slope=1e-2, impl=impl,
        )  # fmt: skip
        (y**2).mean().backward()
        results.append((y, columns.grad, running))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bias", "running_mean", "running_var", "fc2_weight", "fc2_bias"])
def test_a_vector_of_the_wrong_length_is_an_error(name):
    """A kernel would read, and write, what lies behind it in memory."""
    vectors = {
        "weight": torch.ones(4),
        "bias": torch.ones(4),
        "running_mean": torch.ones(4),
        "running_var": torch.ones(4),
        "fc1_weight": torch.ones(2, 4),
        "fc1_bias": torch.ones(2),
        "fc2_weight": torch.ones(4, 2),
        "fc2_bias": torch.ones(4),
    }
    vectors[name] = vectors[name][:3]
    *first, a, b, c, d = (vector.to(DEVICE) for vector in vectors.values())
    x = torch.randn(2, 4, 3, 3, device=DEVICE)
    with pytest.raises(InputError, match=r"of 4 channels, .* got one of shape \(3"):
        abn(x, *first, training=True, se=SEWeights(a, b, c, d), impl="triton")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of inf * 0
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_eval_mode_is_pytorchs_and_as_finite_where_x_is_not(chain):
    """Running statistics do not depend on x: infinity in it is no factor of its gradient."""
    parts = tensors((2, 4, 4, 4), chain, "nhwc")
    parts["x"][0, 2, 1, 1], parts["x"][1, 3, 0, 2] = float("inf"), -float("inf")
    exact = run(parts, chain, "reference", training=False)
    ours = run(parts, chain, "triton", training=False)
    for name, value in exact.items():
        assert torch.equal(ours[name].isfinite(), value.isfinite()), name
        finite = value.isfinite()
        torch.testing.assert_close(ours[name][finite], value[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 12), (3, 4, 5), (2, 3, 2, 3, 2)], ids=["2d", "3d", "5d"])
def test_other_dimensions(shape):
    parts = tensors(shape, CHAINS["abn"], "nchw")
    exact = run(parts, CHAINS["abn"], "reference", dtype=torch.float64)
    assert_equal(run(parts, CHAINS["abn"], "triton"), exact)


@pytest.mark.parametrize(("chain", "layout"), [("blur_se", "nhwc"), ("se_join", "nchw")])
def test_reductions_in_many_chunks(chain, layout, monkeypatch):
    """Small tiles: several chunks a sample, several tiles a chunk, the last of each not full.

    And several rounds where chunks are merged.
    """
    monkeypatch.setattr(launch, "MERGE_TILE", 16)
    for name, value in (("TILE", 32), ("BLUR_TILE", 32), ("PROGRAMS", 12)):
        monkeypatch.setattr(tiles, name, value)
    parts = tensors((2, 5, 6, 5), CHAINS[chain], layout)
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
    parts = tensors((4, 16, 9, 7), chain, "nhwc", dtype, gamma)
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


def test_large_mean_does_not_cancel():
    """Variance 1 about a mean of 1000: the sum of squares in float32 would lose it."""
    x = (torch.randn(8, 4, 6, 6) + 1000).to(DEVICE)
    stats, _ = launch.statistics(
        x, torch.ones(4, device=DEVICE), *torch.zeros(2, 4, device=DEVICE), 0.1, 1e-5, False, False
    )
    exact = x.double().var((0, 2, 3), unbiased=False)
    assert ((stats[3].double() - exact) / exact).abs().max() < 1e-5


def test_takes_views_and_expanded_gradients():
    x = torch.randn(2, 8, 3, 8).to(DEVICE, memory_format=torch.channels_last)
    weight, bias, mean, var = torch.rand(4, 4).to(DEVICE)
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_()
        vectors = (vector.to(dtype, copy=True) for vector in (weight, bias, mean, var))
        y = abn(leaf[:, 2:6], *vectors, training=True, impl=impl)  # channels_last with a hole
        (y * torch.arange(8.0, device=DEVICE)).mean().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-4, atol=1e-6)


def test_nan_stays_nan():
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    x[0, 1, 2, 2] = float("nan")
    ones, zeros = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    statistics = (zeros.clone(), ones.clone())
    options = {"training": True, "slope": None, "shortcut": x, "impl": "triton"}
    y = abn(x, ones, zeros, *statistics, **options)
    assert y[:, 1].isnan().all()
    assert not y[:, 0].isnan().any()


@pytest.mark.parametrize("keep_output", [True, False])
def test_the_gradient_where_a_join_gave_nan_passes(keep_output):
    """As through PyTorch's ReLU: a zero there would hide from a GradScaler what went wrong."""
    parts = tensors((2, 4, 3, 3), CHAINS["join"], "nhwc")
    parts["shortcut"][0, 1, 2, 2] = float("nan")
    options = {"training": False, "keep_output": keep_output}
    ours = run(parts, CHAINS["join"], "triton", **options)["grad of shortcut"]
    exact = run(parts, CHAINS["join"], "reference", **options)["grad of shortcut"]
    assert exact[0, 1, 2, 2] != 0
    torch.testing.assert_close(ours, exact, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", [64, 1 << 16])
def test_a_join_keeps_the_sign_of_each_value_in_a_bit(layout, tile, monkeypatch):
    """Of widths and images that fill bytes, tiles and chunks or do not, and of rounded values."""
    monkeypatch.setattr(tiles, "TILE", tile)
    for shape in ((2, 5, 7, 4), (1, 83, 5, 3), (2, 16, 4, 6), (1, 3, 2, 2), (3, 72, 1, 1)):
        x = (torch.randn(shape) * 1e-7).half().to(DEVICE, memory_format=LAYOUTS[layout])
        x[0, 1, 0, 0] = float("nan")
        bias = torch.zeros(shape[1], device=DEVICE)
        stats = torch.ones(4, shape[1], device=DEVICE)
        stats[0] = 0
        shortcut, grad = x / 2, torch.randn_like(x)
        y, bits = launch.apply(x, stats, bias, None, shortcut, None, False, True)
        passes = launch.unpacked(bits, x)
        assert torch.equal(passes, (y > 0) | y.isnan())
        assert (y == 0).any()
        assert passes.any()
        masked = launch.grad_sums(grad, None, x, bits, None, None, stats, bias, None, False)[1]
        assert torch.equal(masked, torch.where(passes, grad, 0))


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_keeps_one_buffer_and_rebuilds_the_output(chain):
    """Within a scope nothing of full size is kept but x; of a join, whose output is, a bit each."""
    parts = tensors((2, 16, 8, 8), chain, "nhwc")
    leaves = {name: part.requires_grad_() for name, part in parts.items()}
    kept = {}

    def keep(tensor):
        if tensor.numel() >= parts["x"].numel() // 8:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    running = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)
    with recompute.scope():
        x = leaves["x"] * 1
        before = recompute._active.scope
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = call(leaves | {"x": x}, chain, running)
        rebuild = before.find(y)
    kept.pop(x.untyped_storage().data_ptr())
    if chain.conv:
        kept.pop(leaves["conv"].untyped_storage().data_ptr())
    if chain.join:
        assert [bits.nbytes for bits in kept.values()] == [x.numel() // 8]
        assert rebuild is None
    else:
        assert kept == {}
        assert rebuild is None if chain.conv else torch.equal(rebuild(), y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shortcut": (2, 4, 3, 3)}, r"shortcut of \(2, 4, 6, 6\) .* got \(2, 4, 3, 3\)"),
        ({"shortcut": (2, 4, 6, 6), "blur": True}, "a shortcut or a blur, got both"),
        ({"x": (2, 4, 1, 6), "blur": True}, "H and W at least 2"),
        ({"dtype": torch.float64}, r"float32, bfloat16 and float16, got torch.float64"),
        ({"interpret": "0"}, "needs a tensor on a GPU, got one on cpu: use impl='auto'"),
    ],
)
def test_what_cannot_run_is_an_error_that_says_why(options, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", options.get("interpret", "1"))
    device = "cpu" if "interpret" in options else DEVICE
    x = torch.ones(options.get("x", (2, 4, 6, 6)), device=device, dtype=options.get("dtype"))
    vectors = torch.ones(4, 4, device=device)
    shortcut = torch.ones(options["shortcut"], device=device) if "shortcut" in options else None
    tail = {"blur": options.get("blur", False), "shortcut": shortcut}
    with pytest.raises(InputError, match=message):
        abn(x, *vectors, training=True, impl="triton", **tail)


def test_operators_keep_their_promises():
    """Schemas, fake results and mutation of each operator, as PyTorch checks them."""
    x = torch.randn(2, 6, 5, 4, device=DEVICE).to(memory_format=torch.channels_last)
    vector, stats = torch.randn(6, device=DEVICE), torch.rand(4, 6, device=DEVICE)
    gate, half = torch.rand(2, 6, device=DEVICE), torch.randn(2, 6, 3, 2, device=DEVICE)
    half = half.to(memory_format=torch.channels_last)
    partial, _ = launch.grad_sums(half, None, x, None, None, gate, stats, vector, 0.1, True)
    _, moments = launch.statistics(x, vector, vector.clone(), vector.abs(), 0.1, 1e-5, True, True)
    layers = torch.randn(4, 6, device=DEVICE), vector[:4], torch.randn(6, 4, device=DEVICE), vector
    bits = torch.randint(256, (2, 20, 1), dtype=torch.uint8, device=DEVICE)
    calls = [
        (excite.forward, (moments, x, stats, vector, True, False, *layers)),
        (launch.statistics, (x, vector, vector.clone(), vector.abs(), 0.1, 1e-5, True, True)),
        (launch.running_statistics, (vector, vector, vector.abs(), 1e-5)),
        (launch.squeeze, (x, stats, vector, 0.1, True)),
        (launch.apply, (x, stats, vector, gate, None, 0.1, True)),
        (launch.apply, (x, stats, vector, gate, x.clone(), None, False)),
        (launch.apply, (x, stats, vector, gate, x.clone(), None, False, True)),
        (launch.grad_sums, (half, None, x, None, None, gate, stats, vector, 0.1, True)),
        (launch.grad_sums, (x.clone(), x.clone(), x, bits, None, None, stats, vector, None, False)),
        (launch.grad_sums, (x.clone(), None, x, None, None, gate, stats, vector, 0.1, False, True)),
        (launch.merge_grad_sums, (partial, gate, gate, stats, 40)),
        (launch.grad_apply, (half, x, stats, vector, gate, gate, stats, 0.1, True, True)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(
            operator.recorded, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("blur", "se", "layout"),
    [(False, False, "nchw"), (False, True, "nhwc"), (True, False, "nhwc"), (True, True, "nchw")],
)
def test_partial_sums_are_as_many_as_the_compiler_is_told(blur, se, layout, monkeypatch):
    """With many chunks: what is told is counted without x, and the compiler relies on it."""
    for name, value in (("TILE", 16), ("BLUR_TILE", 64), ("PROGRAMS", 1024)):
        monkeypatch.setattr(tiles, name, value)
    x = torch.randn(2, 2, 16, 14, device=DEVICE).to(memory_format=LAYOUTS[layout])
    vector, stats = torch.randn(2, device=DEVICE), torch.rand(4, 2, device=DEVICE)
    gate = torch.rand(2, 2, device=DEVICE) if se else None
    grad = torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True) if blur else x.clone()
    arguments = (grad, None, x, None, None, gate, stats, vector, 0.1, blur)
    groups = len(launch.grad_sums(*arguments)[0])
    assert groups >= 8
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        assert len(launch.grad_sums(*fakes)[0]) == groups


def test_backward_inside_autocast_computes_in_float32():
    parts = tensors((2, 16, 6, 5), CHAINS["se"], "nhwc")
    expected = run(parts, CHAINS["se"], "triton")
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = run(parts, CHAINS["se"], "triton")
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("chain", "training", "keep_output"),
    [
        (Chain(1e-2), True, True),
        (Chain(1e-2), False, True),
        (Chain(1e-2, blur=True, se=True), True, True),
        (Chain(1e-2, se=True, conv=True), True, True),
        (Chain(None, join=True), False, True),
        (Chain(None, se=True, join=True), True, False),
        (Chain(0.3, se=True, join=True), True, True),
        (Chain(0.3, se=True, join=True), False, False),
    ],
)
def test_the_second_derivative_is_pytorch_s(chain, training, keep_output):
    """Without an error, `torch.autograd.grad` would return a part of it."""
    parts = tensors((3, 4, 3, 2), chain, "nhwc")
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {name: part.to(dtype).requires_grad_() for name, part in parts.items()}
        running = (torch.full((4,), value, device=DEVICE, dtype=dtype) for value in (0.0, 1.0))
        y = call(leaves, chain, running, impl, training, keep_output=keep_output)
        first = torch.autograd.grad((y**3).mean(), list(leaves.values()), create_graph=True)
        second = torch.autograd.grad(sum(p.square().sum() for p in first), list(leaves.values()))
        results.append({str(index): value for index, value in enumerate((*first, *second))})
    assert_equal(results[0], results[1], 1e-3)  # of float32: what is left out is of order 1


def test_no_gradient_is_computed_for_an_input_that_wants_none(monkeypatch):
    parts = tensors((2, 4, 6, 6), CHAINS["abn"], "nhwc")
    monkeypatch.setattr(launch, "grad_apply", None)
    leaves = {name: parts[name].clone().requires_grad_(name != "x") for name in parts}
    running = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    y = abn(*leaves.values(), *running, training=True, slope=1e-2, impl="triton")
    y.sum().backward()
    exact = torch.where(y > 0, 1.0, 1e-2).sum((0, 2, 3))
    assert leaves["x"].grad is None
    torch.testing.assert_close(leaves["bias"].grad, exact)
