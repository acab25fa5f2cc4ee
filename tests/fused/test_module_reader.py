"""Modules that `read` accepts for the fused kernels, and modules that it refuses."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrize import register_parametrization

from tests.fused.models import RUNNERS, assert_near, make
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import step
from tresnet.errors import InputError
from tresnet.fused import groups
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.ops.launching import recorded_launches
from tresnet.surgery import fold, swap_norm

IMAGES = (2, 3, 32, 32)


def images():
    torch.manual_seed(1)
    return torch.rand(IMAGES, device=DEVICE)


def launches(model, x=None):
    """Names of the kernels that a forward launches."""
    with recorded_launches() as launches:
        model(images() if x is None else x)
    return [one.kernel.__name__ for one in launches]


def doubled(module):
    kind = type(module)
    forward = {"forward": lambda self, x: kind.forward(self, x) * 2}
    module.__class__ = type("Doubled", (kind,), forward)


def own_forward(module):
    forward = module.forward
    module.forward = lambda x: forward(x) * 0.5


class Halved(torch.Tensor):
    """A weight with convolutions of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        y = super().__torch_function__(function, types, args, kwargs or {})
        return y.as_subclass(torch.Tensor) * 0.5 if function is torch.conv2d else y


def of_its_own_kind(conv):
    conv.weight = nn.Parameter(conv.weight.detach().as_subclass(Halved))


def own_convolution(conv):
    run = conv._conv_forward
    conv._conv_forward = lambda *a: run(*a) * 0.5


# Attributes of modules, and what they are set to.
VALUES = {
    "dilated": ("0.conv2.conv", {"padding": (2, 2), "dilation": (2, 2)}),
    "biased": ("0.conv2.conv", {"bias": nn.Parameter(torch.full((8,), 0.5))}),
    "reflecting": (
        "0.conv2.conv",
        {"padding_mode": "reflect", "_reversed_padding_repeated_twice": (1, 1, 1, 1)},
    ),
    "one gate": ("0.se", {"fc2": nn.Conv2d(64, 1, 1)}),
    "grouped gate": ("0.se", {"fc1": nn.Conv2d(8, 64, 1, groups=2)}),
    "wide gate": ("0.se", {"fc1": nn.Conv2d(8, 64, 3, padding=1)}),
    "gate without bias": ("0.se.fc1", {"bias": None}),
    "gate by maximum": ("0.se.pool", {"pool_type": "max"}),
    "mean of all batches": ("0.conv2.bn", {"momentum": None}),
    "untracked": ("0.conv2.bn", {"running_mean": None, "running_var": None}),
    "another shortcut": ("0", {"downsample": nn.AdaptiveAvgPool2d(1)}),
    "another drop path": ("0", {"drop_path": nn.Dropout(0.0)}),
}
CHANGES = {
    **{f"hook of {name}": (name, lambda m: m.register_forward_hook(lambda *_: None))
       for name in ("", "0", "0.conv1", "0.conv1.conv", "0.conv2.bn", "0.se", "0.se.fc1",
                    "0.se.pool", "0.conv1.aa", "0.drop_path", "0.downsample")},
    "backward hook": ("0", lambda m: m.register_full_backward_hook(lambda *_: None)),
    **{f"{change.__name__} of {name}": (name, change)
       for name in ("0", "0.conv1", "0.conv2.bn", "0.se") for change in (doubled, own_forward)},
    "parametrization": ("0.conv1.conv", lambda m: register_parametrization(m, "weight", nn.Tanh())),
    "another kind of tensor": ("0.conv2.conv", of_its_own_kind),
    "own convolution": ("0.conv2.conv", own_convolution),
    "another block": ("", lambda m: m.append(nn.Hardtanh())),
    "twice": ("", lambda m: m.append(m[0])),
}  # fmt: skip


def change(part, name):
    """Change a stage by a row of `VALUES` or `CHANGES`."""
    if name in CHANGES:
        path, act = CHANGES[name]
        act(part.get_submodule(path))
        return
    path, values = VALUES[name]
    for attribute, value in copy.deepcopy(values).items():
        setattr(part.get_submodule(path), attribute, value)
    part.to(DEVICE)


@pytest.mark.parametrize("how", ["forward", "global module hooks"])
def test_space_to_depth_of_bytes_is_called_if_it_was_changed(how):
    model, seen, forward = make("triton"), [], SpaceToDepth.forward
    pixels = torch.randint(256, (2, 3, 40, 48), dtype=torch.uint8, device=DEVICE)
    module = next(m for m in model.modules() if type(m) is SpaceToDepth)
    handles = []
    if how == "forward":
        module.forward = lambda x: seen.append(1) or forward(module, x)
    else:
        hook = nn.modules.module.register_module_forward_hook
        handles.append(hook(lambda m, *_: seen.append(1) if m is module else None))
        model.runner = make("fallback").runner
    try:
        with pytest.warns(UserWarning, match=how) if handles else nullcontext():
            model(pixels)
    finally:
        for handle in handles:
            handle.remove()
    assert seen


def test_bytes_take_the_dtype_of_weights_if_nothing_can_run_by_the_program():
    pixels = torch.randint(256, (2, 3, 40, 48), dtype=torch.uint8, device=DEVICE)
    model = make("fallback").bfloat16().eval()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(UserWarning, match="global module hooks"):
            logits = model(pixels)
    finally:
        handle.remove()
    assert torch.equal(logits, make("plain").bfloat16().eval()(pixels))


@pytest.mark.parametrize("name", [*CHANGES, *VALUES])
def test_a_part_that_is_not_as_it_was_built_runs_as_it_is_and_the_others_by_the_program(name):
    kernels, model, expected = make("triton"), make("fallback"), make("plain")
    for which in (kernels, model, expected):
        change(which.body.layer1, name)
    with pytest.raises(InputError, match=r"impl='triton' cannot run layer1: "):
        kernels(images())
    x = images().double()  # in float32, a value near 0 may be on either side of a ReLU's kink
    model, expected = model.double(), expected.double()
    with pytest.warns(UserWarning, match=r"^layer1 runs as plain modules: "), Recorder() as r:
        ours = step(model, x)
    for key, value in step(expected, x).items():
        if value.double().norm() > 1e-6:  # of a bias in front of a norm
            difference = (ours[key] - value).double().norm()
            assert difference <= 1e-10 * value.double().norm(), key
    assert "var_mean" in r.names()  # of the definition of a fused norm


def test_hooks_of_every_module_are_called():
    seen = []
    model = make("fallback").eval()
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        with pytest.warns(UserWarning, match="global module hooks"):
            model(images())
    finally:
        handle.remove()
    assert {*model.body.modules()} - {model.body} <= {*seen}


def test_nothing_is_kept_between_calls():
    """A cache would lose gradients after a call without them, new weights and copies."""
    x = images().double()
    model, other = make("definitions").double(), make("definitions").double()
    with torch.no_grad():
        model.eval()(x)
        model.train()
        for parameter in other.parameters():
            parameter.mul_(1.1)
    assert_near(step(copy.deepcopy(model), x), step(make("definitions").double(), x), 1e-12)
    state = copy.deepcopy(other.state_dict())
    logits = torch.func.functional_call(model, copy.deepcopy(state), (x,))
    torch.testing.assert_close(logits, copy.deepcopy(other)(x))
    model.load_state_dict(state, assign=True)
    ours = step(model, x)
    assert_near(ours, step(other, x), 1e-12)
    model.body.layer2[0].conv1.conv.weight = nn.Parameter(torch.zeros(16, 8, 3, 3).to(x))
    assert not torch.equal(model(x), ours["logits"])


def test_a_frozen_weight_or_another_mode_counts_from_the_next_call():
    model = make("definitions").double()
    step(model, images().double())
    model.zero_grad()
    model.body.layer2.requires_grad_(False).eval()
    model(images().double()).sum().backward()
    assert all(p.grad is None for p in model.body.layer2.parameters())
    assert all(p.grad is not None for p in model.body.layer1.parameters())
    assert model.body.layer2[0].conv1.bn.num_batches_tracked == 1
    assert model.body.layer1[0].conv1.bn.num_batches_tracked == 2


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("layer2.0.conv1.aa", nn.Parameter(torch.ones(8))),
        ("layer1.0.conv1", nn.Parameter(torch.ones(8))),
        ("layer1.0.conv2", nn.Identity()),
        ("layer1.0.conv1.bn", nn.Parameter(torch.ones(8))),
        ("layer1.0.se", nn.Identity()),
        ("layer3.0", nn.Identity()),
    ],
)
def test_a_part_that_the_program_does_not_know_is_refused_and_not_ignored(path, part):
    """A learnable bias after the blur, say: without this, a GPU would leave it out."""
    kernels, model = make(), make("fallback")
    for which in (kernels, model):
        which.body.get_submodule(path).shift = copy.deepcopy(part).to(DEVICE)
    stage, message = path[:6], r"expected, got (.*, )?shift"
    with pytest.raises(InputError, match=rf"'triton' cannot run {stage}: .* {message}"):
        kernels(images())
    with pytest.warns(UserWarning, match=rf"^{stage} runs as plain modules: .* {message}"):
        model(images())


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
def test_a_cpu_runs_plain_modules_without_reading_them(monkeypatch):
    monkeypatch.setattr(groups, "read", lambda *_: pytest.fail("read"))
    assert launches(make("auto")) == []


def test_other_norms_run_as_plain_modules_without_a_word():
    model = make()
    swap_norm(model, "batchnorm")
    assert launches(model) == []
    swap_norm(model, "abn")
    assert "apply" in launches(model)


@pytest.mark.parametrize("part", ["", "layer3", "layer2.0.downsample"])
def test_one_synchronised_norm_makes_the_whole_model_plain(part):
    """Ranks that read other modules would call the collectives in another order."""
    model, expected = make().eval(), make("plain").eval()
    body = model.body.get_submodule(part)
    for name, child in body.named_children():
        setattr(body, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
    torch.testing.assert_close(model(images()), expected(images()))
    assert launches(model) == launches(model.train()) == []


def set_vector(model, name, change):
    """Change a vector of 8 values: kernels would read, and write, what lies behind the new one."""
    norm = model.body.layer1[0].conv1.bn
    vector = getattr(norm, name)
    setattr(norm, name, type(vector)(change(vector.detach())))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (nn.Module.double, "float64"),
        (lambda model: model.body.layer2.bfloat16(), "not all weights"),
        (
            lambda model: setattr(model.body.layer2[0].downsample[1], "aa", BlurPool2d(jit=False)),
            r"layer2: a shortcut of another shape",
        ),
        *(
            (functools.partial(set_vector, name=name, change=change), f"layer1: .*{name} {got} on")
            for name in ("weight", "bias", "running_mean", "running_var")
            for change, got in (
                (lambda vector: vector[:3], r"\(3,\) with strides \(1,\)"),
                (lambda vector: vector.repeat_interleave(2)[::2], r"\(8,\) with strides \(2,\)"),
            )
        ),
    ],
)
def test_what_the_kernels_cannot_compute_is_an_error(act, message):
    model = make()
    act(model)
    with pytest.raises(InputError, match=message):
        model(images().to(model.head.fc.weight.dtype))


def test_without_a_gpu_the_kernels_are_an_error(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        InputError, match="needs a tensor on a GPU, got one on cpu: use impl='auto'"
    ):
        make().cpu()(images().cpu())


def test_folded_models_with_gradients_run_their_modules():
    folded, x = fold(make("fallback").eval()), images()
    with torch.no_grad():
        expected = folded(x)
    x.requires_grad_()
    with pytest.warns(UserWarning, match="no gradients in the fused kernels"):
        y = folded(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None


def test_a_hook_of_a_folded_convolution_sees_its_output_alone():
    folded, seen = fold(make("fallback").eval()), []
    conv = folded.body.layer3[0].conv2.conv
    conv.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    with torch.inference_mode(), pytest.warns(UserWarning, match=r"layer3 .* Conv2d has hooks"):
        folded(images())
    ((source, convolved),) = seen
    torch.testing.assert_close(convolved, conv._conv_forward(source, conv.weight, conv.bias))


def test_forward_mode_derivatives_and_transforms_take_plain_modules():
    model = make("triton").eval()
    tangent = torch.randn(IMAGES, device=DEVICE)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(images(), tangent)))
    _, slope = torch.func.jvp(model, (images(),), (tangent,))
    torch.testing.assert_close(dual.tangent, slope)


def test_plain_parts_take_bytes():
    model, pixels, seen = make("plain").eval(), (images() * 255).to(torch.uint8), []
    expected = model(pixels.float() / 255)
    torch.testing.assert_close(model(pixels), expected)
    model.runner = RUNNERS["definitions"]
    model.body.s2d.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    torch.testing.assert_close(model(pixels), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0][0], pixels.float() / 255)


def test_make_fx_records_plain_operators():
    model = make().eval()
    with torch.no_grad():
        graph = make_fx(model)(images() + 1)
        torch.testing.assert_close(graph(images()), model(images()), rtol=1e-4, atol=1e-5)
