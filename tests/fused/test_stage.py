"""The fused program against plain modules in float64: outputs, gradients, running statistics."""

import copy
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fused.models import PADDED, assert_near, make, plain, step
from tests.live_storages import live_after
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet import fused
from tresnet.errors import InputError
from tresnet.fused import RECOMPUTE, padding
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.ops.launching import noted
from tresnet.surgery import fold

# Blocks of each kind, with and without a convolution on the shortcut, halving and not; widths that
# are no multiple of 8, unpadded and padded.
MODELS = {
    "m": {"name": "tresnet_m", "layers": (2, 2, 1, 2)},
    "l": {"name": "tresnet_l", "layers": (1, 2, 2, 1), "width_factor": 0.3},
    "v2_l": {"name": "tresnet_v2_l", "layers": (2, 1, 1, 2)},
    "t": {"layers": (1, 1, 1, 2)},
    "group_attention": {"head": "group_attention", "head_groups": 2, "head_channels": 8},
    **{f"padded {name}": options for name, options in PADDED.items()},
}


@pytest.fixture
def model(request, monkeypatch):
    """Options of a model of the table; its parts are padded at any size if its name says so."""
    if request.param in ("padded l", "padded xl"):
        monkeypatch.setattr(padding, "FROM", 0)
    return MODELS[request.param]


def images(dtype=torch.float32, batch=2, side=40):
    torch.manual_seed(1)
    x = torch.rand(batch, 3, side, side + 8).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_definitions_equal_the_plain_modules(model, recompute):
    """Compare every stage, with dropped paths, in float64, where only a wrong formula differs."""
    ours = make("reference", **model, drop_path_rate=0.3, recompute=recompute).double()
    exact = step(plain(ours), images(torch.float64, 3))
    assert_near(step(ours, images(torch.float64, 3)), exact, 1e-10)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        *(("m", "activations"), ("l", "outputs"), ("v2_l", "none"), ("t", "activations")),
        *(("padded l", "outputs"), ("padded xl", "activations")),
    ],
    indirect=["model"],
)
def test_kernels_equal_the_plain_modules(model, recompute):
    options = {**model, "recompute": recompute, "drop_path_rate": 0.3}
    ours = make(**options).to(memory_format=torch.channels_last)
    exact = step(plain(ours), images().double())
    assert_near(step(ours, images()), exact, 1e-4)


def gradients(model, x):
    """Return all gradients of a model as one vector."""
    dtype = x.dtype if x.dtype != torch.float64 else None
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):  # backward computes as forward
        y = model(x if dtype is None else x.float())
        assert y.dtype == x.dtype
        y.double().square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["kernels", "padding"])
def test_16_bits_lose_what_the_definitions_and_unpadded_channels_lose(what, dtype, monkeypatch):
    options, found = PADDED["xl"] if what == "padding" else {}, []
    exact = gradients(plain(make(**options)), images(torch.float64))
    for first in (True, False):
        monkeypatch.setattr(padding, "FROM", 0 if what == "padding" and first else 1 << 40)
        impl = "triton" if what == "kernels" and first else "reference"
        model = make(impl, **options).to(memory_format=torch.channels_last)
        found.append((gradients(model, images(dtype)) - exact).norm())
    assert found[0] <= 1.2 * found[1]
    with torch.autocast(DEVICE, dtype):
        assert model.forward_features(images()).dtype == dtype


@pytest.mark.parametrize(
    ("impl", "trained"),
    [
        *(("reference", f"(?!body.{frozen})") for frozen in ("conv1", "layer1", "layer[12]")),
        *(("reference", f"(?!.*{frozen})") for frozen in (".bn.", ".conv.weight")),
        *(
            (impl, trained)
            for impl in ("reference", "triton")
            for trained in (
                "body.layer3.0.se",
                "body.layer4.0.conv3.bn",
                "body.(layer1.0.se|layer2)",
            )
        ),
    ],
)
def test_frozen_parameters_have_no_gradients_and_the_others_theirs(impl, trained):
    ours = make(impl, layers=(2, 1, 1, 2) if impl == "reference" else (1, 1, 1, 1))
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(re.match(trained, name) is not None)
    ours = ours.double() if impl == "reference" else ours
    exact = step(plain(ours), images(torch.float64))
    x = images(torch.float64 if impl == "reference" else torch.float32)
    assert_near(step(ours, x), exact, 1e-10 if impl == "reference" else 1e-4)


def test_no_map_is_kept_in_front_of_the_first_parameter_that_trains():
    model = make(layers=(2, 1, 1, 1))
    for stage in (model.body.conv1, model.body.layer1, model.body.layer2, model.body.layer3):
        stage.requires_grad_(False)
    ignored = [*model.parameters(), *model.buffers()]
    alive = live_after(lambda: model(images()), ignored)
    assert all(shape[2] <= 5 for shape, _ in alive), alive  # of layer4 and its input


def test_bytes_are_kept_as_bytes():
    pixels = (images() * 255).to(torch.uint8)
    exact = step(plain(make()), pixels.double() / 255)
    assert_near(step(make("reference").double(), pixels), exact, 1e-6)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = make()(pixels)
    torch.testing.assert_close(y, make()(pixels.float() / 255))
    assert any(t.dtype == torch.uint8 and t.shape == pixels.shape for t in saved)
    assert not any(t.is_floating_point() and t.shape[:2] == (2, 12) for t in saved)


def test_images_have_gradients():
    ours, x = make("reference").double(), images(torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(ours(x).square().sum(), x)
    (exact,) = torch.autograd.grad(plain(ours)(x).square().sum(), x)
    torch.testing.assert_close(grad, exact)


def test_rebuilding_more_keeps_less():
    stage, x, kept = make(layers=(1, 1, 2, 1)).body.layer3, torch.rand(2, 16, 8, 8).to(DEVICE), []
    for what in RECOMPUTE:
        how = fused.How("triton", what)
        alive = live_after(lambda how=how: fused.run({"stage": stage}, x, how), stage.parameters())
        kept.append(sum(size for _, size in alive))
    assert kept[0] > 1.2 * kept[1]
    assert kept[1] > kept[2]


def test_one_buffer_per_convolution_is_kept():
    """The stem's input, each convolution's output, each block's output but the last: no more."""
    model, x = make(layers=(2, 1, 1, 1)), images()
    outputs, hooked = [], plain(model)
    for module in hooked.body.modules():
        if isinstance(module, nn.Conv2d) or type(module).__name__ in ("BasicBlock", "Bottleneck"):
            module.register_forward_hook(lambda _m, _i, y: outputs.append(y.numel() * 4))
    stem = []
    hooked.body.conv1.register_forward_hook(lambda _m, i, _y: stem.append(i[0].numel()))
    hooked(x.double())
    kept = sum(size for _, size in live_after(lambda: model(x), [x, *model.parameters()]))
    expected = sum(outputs[:-1]) + 4 * stem[0]
    assert kept == pytest.approx(expected, rel=0.03)  # and a bit a join, and gates


def test_a_user_may_checkpoint_a_whole_model():
    expected, model = step(make("reference"), images()), make("reference")
    checkpoint(model, images(), use_reentrant=False).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_second_backward_and_saved_tensor_hooks():
    stage = make().body.layer3
    x, how = torch.rand(2, 16, 6, 5, device=DEVICE), fused.How("triton")
    loss = fused.run({"stage": stage}, x, how).square().sum()
    expected = torch.autograd.grad(loss, list(stage.parameters()))
    with torch.autograd.graph.save_on_cpu():
        loss = fused.run({"stage": stage}, x, how).square().sum()
    (0.5 * loss).backward(retain_graph=True)
    (0.5 * loss).backward()
    torch.testing.assert_close(tuple(p.grad for p in stage.parameters()), expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_weights_of_a_functional_call_are_freed_by_backward():
    model = make("reference")
    weights = {name: parameter * 1 for name, parameter in model.named_parameters()}
    references = [weakref.ref(weight) for weight in weights.values()]
    loss = torch.func.functional_call(model, weights, (images(),)).sum()
    del weights
    loss.backward()
    assert not any(reference() is not None for reference in references)


def test_a_parameter_changed_between_forward_and_backward_is_an_error():
    model = make("reference")
    loss = model(images()).sum()
    with torch.no_grad():
        model.body.layer3[0].conv2.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("start", [0, 1 << 40], ids=["padded", "unpadded"])
def test_second_derivatives_are_those_of_plain_modules(start, monkeypatch):
    monkeypatch.setattr(padding, "FROM", start)
    found = []
    ours = make("reference", **{**PADDED["l"], "layers": (3, 2, 1, 1)}).double()
    ours.body.layer1[2].conv1.conv.weight = ours.body.layer1[1].conv1.conv.weight  # shared
    for which in (ours, plain(ours)):
        parameters = list(which.parameters())
        loss = which(images(torch.float64)).square().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


def test_second_derivatives_under_autocast():
    found = []
    ours = make("reference")
    for which, enabled in ((ours, True), (plain(ours), False)):
        x = images() if enabled else images(torch.float64)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            y = which(x)
        parameters = list(which.parameters())
        first = torch.autograd.grad(y.square().sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        found.append(torch.cat([g.flatten().double() for g in second]))
    assert (found[0] - found[1]).norm() < 0.3 * found[1].norm()


def test_second_derivatives_of_kernels_are_an_error():
    model = make()
    with pytest.raises(InputError, match=r"set_impl\('reference'\)"):
        torch.autograd.grad(model(images()).sum(), list(model.parameters()), create_graph=True)


def test_a_norm_is_two_passes_and_joins_add_no_two_gradients():
    model = make(layers=(2, 1, 1, 1)).to(memory_format=torch.channels_last)
    with Recorder() as forward, noted() as launches:
        loss = model(images()).square().sum()
    names = forward.names()
    norms = sum(type(m).__name__ == "ABN" for m in model.modules())
    kernels = [one.kernel.__name__.removesuffix("_blurred") for one in launches]
    assert kernels.count("moments") == kernels.count("apply") == norms
    assert names.count("_foreach_add_") == 4  # the batches of a part are counted together
    assert not {"add", "mul", "leaky_relu_", "relu_", "reflection_pad2d"} & set(names)
    with Recorder() as backward:
        loss.backward()
    added = [
        call
        for call in backward.calls
        if call[0].overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        and all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in call[1][:2])
    ]
    assert len(added) == 2  # of the first stage's input, and behind the last pool, of odd height


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("folds", [None, "fold", "merge_stem"])
def test_inference_is_one_pass_between_two_convolutions(folds, dtype):
    model = make().eval()
    if folds:
        model = fold(model, merge_stem=folds == "merge_stem")
    model = model.to(dtype).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).double()
    exact.set_impl("auto")
    with torch.no_grad(), Recorder() as recorder, noted() as launches:
        ours = model.forward_features(images(dtype)).double()
    with torch.inference_mode():
        assert torch.equal(model.forward_features(images(dtype)).double(), ours)
        expected = exact.forward_features(images(dtype).double())
    assert (ours - expected).norm() <= 3 * torch.finfo(dtype).eps * expected.norm()
    names = recorder.names()
    kernels = [one.kernel.__name__.removesuffix("_blurred") for one in launches]
    assert names.count("convolution") == kernels.count("apply") == 14
    assert not {"add", "add_", "mul", "leaky_relu_", "relu_", "reflection_pad2d"} & set(names)


def test_inference_takes_bytes():
    pixels = (images() * 255).to(torch.uint8)
    model = make("reference").eval()
    for which in (model, fold(model), fold(model, merge_stem=True)):
        with torch.inference_mode():
            ours = which(pixels)
            which.set_impl("auto")
            torch.testing.assert_close(ours, which(pixels.float() / 255), rtol=1e-4, atol=1e-5)


def test_a_rebuilt_join_of_parallel_branches_repeats_its_input():
    part = nn.Sequential(ParallelBottleneck(2, 8), ConvNormAct(16, 16, 1)).double()
    x, how = torch.rand(3, 8, 6, 6, dtype=torch.float64), fused.How("reference", "outputs")
    outputs = fused.run({"part": part}, x, how), part(x)
    found, expected = (
        torch.autograd.grad(y.square().sum(), list(part.parameters())) for y in outputs
    )
    torch.testing.assert_close(found, expected)


def test_a_shortcut_may_lie_otherwise_than_what_it_joins():
    stage = make().body.layer2.to(memory_format=torch.contiguous_format)
    stage[0].conv2.to(memory_format=torch.channels_last)
    x, exact = torch.rand(2, 8, 6, 6, device=DEVICE), copy.deepcopy(stage).double()
    outputs = fused.run({"stage": stage}, x, fused.How("triton")), exact(x.double())
    found, expected = (
        torch.autograd.grad(y.square().sum(), list(part.parameters()))
        for y, part in zip(outputs, (stage, exact), strict=True)
    )
    for ours, value in zip(found, expected, strict=True):
        assert (ours.double() - value).norm() <= 1e-4 * value.norm()
