"""Modules that `read` accepts for the fused kernels, and modules that it refuses."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import register_parametrization

from tests.fused import models
from tests.fused.models import assert_near, make
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import step
from tresnet.errors import InputError
from tresnet.fused import groups
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.ops.launching import recorded_launches
from tresnet.surgery import fold, swap_norm

images = functools.partial(models.images, side=32)


def launches(model):
    """Return the number of kernels that a forward launches."""
    with recorded_launches() as launches:
        model(images())
    return len(launches)


def hook(module):
    module.register_forward_hook(lambda *_: None)


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


def with_values(**values):
    """Return a function that sets attributes of a module."""

    def act(module):
        for name, value in copy.deepcopy(values).items():
            setattr(module, name, value)
        module.to(DEVICE)

    return act


# Paths in a stage, and changes of the module there.
CHANGES = {
    **{f"hook of {name}": (name, hook)
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
    "dilated": ("0.conv2.conv", with_values(padding=(2, 2), dilation=(2, 2))),
    "padded by name": ("0.conv2.conv", with_values(padding="same")),
    "biased": ("0.conv2.conv", with_values(bias=nn.Parameter(torch.full((8,), 0.5)))),
    "reflecting": ("0.conv2.conv", with_values(
        padding_mode="reflect", _reversed_padding_repeated_twice=(1, 1, 1, 1))),
    "one gate": ("0.se", with_values(fc2=nn.Conv2d(64, 1, 1))),
    "grouped gate": ("0.se", with_values(fc1=nn.Conv2d(8, 64, 1, groups=2))),
    "wide gate": ("0.se", with_values(fc1=nn.Conv2d(8, 64, 3, padding=1))),
    "gate without bias": ("0.se.fc1", with_values(bias=None)),
    "gate by maximum": ("0.se.pool", with_values(pool_type="max")),
    "mean of all batches": ("0.conv2.bn", with_values(momentum=None)),
    "untracked": ("0.conv2.bn", with_values(running_mean=None, running_var=None)),
    "another shortcut": ("0", with_values(downsample=nn.AdaptiveAvgPool2d(1))),
    "another drop path": ("0", with_values(drop_path=nn.Dropout(0.0))),
}  # fmt: skip


@pytest.mark.parametrize(("path", "act"), CHANGES.values(), ids=CHANGES)
def test_a_part_that_is_not_as_it_was_built_runs_as_it_is_and_the_others_by_the_program(path, act):
    kernels, model, expected = make("triton"), make("fallback"), make("plain")
    for which in (kernels, model, expected):
        act(which.body.layer1.get_submodule(path))
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


def test_hooks_of_every_module_are_called_and_bytes_take_the_dtype_of_weights():
    model, seen = make("fallback").bfloat16().eval(), []
    pixels = (images() * 255).to(torch.uint8)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        with pytest.warns(UserWarning, match="global module hooks"):
            logits = model(pixels)
    finally:
        handle.remove()
    assert {*model.body.modules()} - {model.body} <= {*seen}
    assert torch.equal(logits, make("plain").bfloat16().eval()(pixels))


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_changed_space_to_depth_of_bytes_is_called(how):
    pixels, seen = (images() * 255).to(torch.uint8), []
    expected = make("plain").eval()(pixels.float() / 255)
    torch.testing.assert_close(make("plain").eval()(pixels), expected)
    model = make("definitions").eval()
    module, run = model.body.s2d, model.body.s2d.forward
    if how == "hook":
        module.register_forward_hook(lambda _, args, y: seen.append(args[0]))
    else:
        module.forward = lambda x: seen.append(x) or run(x)
    torch.testing.assert_close(model(pixels), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0], pixels.float() / 255)


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
    for stage, trains in (model.body.layer1, True), (model.body.layer2, False):
        assert all((p.grad is not None) == trains for p in stage.parameters())
        assert stage[0].conv1.bn.num_batches_tracked == 1 + trains


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
    model = make()
    model.body.get_submodule(path).shift = copy.deepcopy(part).to(DEVICE)
    with pytest.raises(InputError, match=rf"cannot run {path[:6]}: .* expected, got (.*, )?shift"):
        model(images())


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
def test_a_cpu_runs_plain_modules_without_reading_them(monkeypatch):
    monkeypatch.setattr(groups, "read", lambda *_: pytest.fail("read"))
    assert launches(make("auto")) == 0


def test_other_norms_run_as_plain_modules_without_a_word():
    model = make()
    swap_norm(model, "batchnorm")
    assert launches(model) == 0
    swap_norm(model, "abn")
    assert launches(model) > 0


@pytest.mark.parametrize("part", ["", "layer3", "layer2.0.downsample"])
def test_one_synchronised_norm_makes_the_whole_model_plain(part):
    """Ranks that read other modules would call the collectives in another order."""
    model, expected = make().eval(), make("plain").eval()
    body = model.body.get_submodule(part)
    for name, child in body.named_children():
        setattr(body, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
    torch.testing.assert_close(model(images()), expected(images()))
    assert launches(model) == launches(model.train()) == 0


SHORT = (lambda vector: vector[:3]), r"\(3,\) with strides \(1,\)"
WITH_GAPS = (lambda vector: vector.repeat_interleave(2)[::2]), r"\(8,\) with strides \(2,\)"


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize(("change", "got"), [SHORT, WITH_GAPS])
def test_vectors_whose_values_kernels_would_not_find_are_an_error(name, change, got):
    model = make()
    norm = model.body.layer1[0].conv1.bn
    vector = getattr(norm, name)
    setattr(norm, name, type(vector)(change(vector.detach())))
    with pytest.raises(InputError, match=f"layer1: .*{name} {got} on"):
        model(images())


@pytest.mark.parametrize(
    ("path", "name", "value", "message"),
    [
        ("layer2.0.downsample.1", "aa", BlurPool2d(jit=False), "a shortcut of another shape"),
        (
            "layer2.0.downsample.0",
            "ceil_mode",
            False,
            "expected AvgPool2d with .*'ceil_mode': True",
        ),
        ("layer2.0.conv2.conv", "stride", (2, 2), "in a block that changes height or width"),
        ("", "layer2", nn.Sequential(), "it is empty"),
    ],
)
def test_what_the_kernels_cannot_compute_is_an_error(path, name, value, message):
    model = make()
    setattr(model.body.get_submodule(path), name, value)
    with pytest.raises(InputError, match=f"layer2: .*{message}"):
        model(images())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (nn.Module.double, "float64"),
        (lambda model: model.body.layer2.bfloat16(), "not all weights"),
    ],
)
def test_dtypes_without_kernels_are_an_error(act, message):
    model = make()
    act(model)
    with pytest.raises(InputError, match=message):
        model(images().to(model.head.fc.weight.dtype))


def test_without_a_gpu_the_kernels_are_an_error(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    message = "needs a tensor on a GPU, got one on cpu: use impl='auto'"
    with pytest.raises(InputError, match=message):
        make().cpu()(images().cpu())


def test_folded_models_with_gradients_run_their_modules():
    folded = fold(make("fallback").eval()).requires_grad_()
    with torch.no_grad():
        expected = folded(images())
    with pytest.warns(UserWarning, match="no gradients in the fused kernels"):
        y = folded(images())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert folded.body.conv1.conv.weight.grad is not None


def test_a_hook_of_a_folded_convolution_sees_its_output_alone():
    folded, seen = fold(make("fallback").eval()), []
    conv = folded.body.layer3[0].conv2.conv
    conv.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    with torch.inference_mode(), pytest.warns(UserWarning, match=r"layer3 .* Conv2d has hooks"):
        folded(images())
    ((source, convolved),) = seen
    torch.testing.assert_close(convolved, conv._conv_forward(source, conv.weight, conv.bias))


def test_forward_mode_derivatives_and_transforms_take_plain_modules():
    model, tangent = make().eval(), torch.randn_like(images())
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(images(), tangent)))
    _, slope = torch.func.jvp(model, (images(),), (tangent,))
    torch.testing.assert_close(dual.tangent, slope)
