"""The fused kernels against plain modules in float64: outputs, gradients, running statistics."""

import copy
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.fused.models import PADDED, assert_near, images, make, plain
from tests.live_storages import live_after
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, LAYOUTS, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import step
from tresnet.errors import InputError
from tresnet.fused import Runner, cast_and_pad
from tresnet.models.tresnet import run_children
from tresnet.ops.launching import recorded_launches

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
        monkeypatch.setattr(cast_and_pad, "PAD_FROM_VALUES", 0)
    return MODELS[request.param]


@pytest.mark.parametrize("recompute", ["none", "activations"])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_definitions_equal_the_plain_modules(model, recompute):
    """Compare every stage, with dropped paths, in float64, where only a wrong formula differs."""
    ours = make("definitions", recompute, **model, drop_path_rate=0.3).double()
    results = []
    for which in (plain(ours), ours):
        x = images(torch.float64, 3).requires_grad_()
        results.append({**step(which, x), "gradient of images": x.grad})
    assert_near(results[1], results[0], 1e-10)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        *(("m", "activations"), ("padded l", "none")),
        # the operations' own tests have every kernel, and the definitions every model
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("l", "none"), ("v2_l", "none"), ("t", "activations")),
                ("padded xl", "activations"),
            )
        ),
    ],
    indirect=["model"],
)
def test_kernels_equal_the_plain_modules(model, recompute):
    ours = make("triton", recompute, **model, drop_path_rate=0.3).to(
        memory_format=torch.channels_last
    )
    exact = step(plain(ours), images().double())
    assert_near(step(ours, images()), exact, 1e-4)


def gradients(model, x):
    """Return all gradients of a model as one vector."""
    model.zero_grad()
    dtype = x.dtype if x.dtype != torch.float64 else None
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):  # backward computes as forward
        y = model(x if dtype is None else x.float())
        assert y.dtype == x.dtype
        y.double().square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", [pytest.param("kernels", marks=pytest.mark.slow), "padding"])
def test_16_bits_lose_what_the_definitions_and_unpadded_channels_lose(what, dtype, monkeypatch):
    options, errors = PADDED["xl"] if what == "padding" else {}, []
    # of one batch alone, the ratio below is noise: 0.8 to 1.44 were seen
    batches = images(torch.float64, 8).split(2)
    exact = torch.stack([gradients(plain(make(**options)), x) for x in batches])
    for first in (True, False):
        monkeypatch.setattr(
            cast_and_pad, "PAD_FROM_VALUES", 0 if what == "padding" and first else 1 << 40
        )
        impl = "triton" if what == "kernels" and first else "definitions"
        model = make(impl, **options).to(memory_format=torch.channels_last)
        made = torch.stack([gradients(model, x.to(dtype)) for x in batches])
        errors.append((made - exact).norm())
    assert errors[0] <= 1.2 * errors[1]
    with torch.autocast(DEVICE, dtype):
        assert model.forward_features(images()).dtype == dtype


@pytest.mark.parametrize(
    ("impl", "trained"),
    [
        *(("definitions", f"(?!body.{frozen})") for frozen in ("conv1", "layer1", "layer[12]")),
        *(("definitions", f"(?!.*{frozen})") for frozen in (".bn.", ".conv.weight")),
        *(
            (impl, trained)
            for impl in ("definitions", "triton")
            for trained in (
                "body.layer3.0.se",
                "body.layer4.0.conv3.bn",
                "body.(layer1.0.se|layer2)",
            )
        ),
    ],
)
def test_frozen_parameters_have_no_gradients_and_the_others_theirs(impl, trained):
    ours = make(impl, layers=(2, 1, 1, 2) if impl == "definitions" else (1, 1, 1, 1))
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(re.match(trained, name) is not None)
    ours = ours.double() if impl == "definitions" else ours
    exact = step(plain(ours), images(torch.float64))
    x = images(torch.float64 if impl == "definitions" else torch.float32)
    assert_near(step(ours, x), exact, 1e-10 if impl == "definitions" else 1e-4)


def test_no_map_is_kept_in_front_of_the_first_parameter_that_trains():
    model = make(layers=(2, 1, 1, 1))
    for stage in (model.body.conv1, model.body.layer1, model.body.layer2, model.body.layer3):
        stage.requires_grad_(False)
    ignored = [*model.parameters(), *model.buffers()]
    alive = live_after(lambda: model(images()), ignored)
    assert all(shape[2] <= 5 for shape, _ in alive), alive  # of layer4 and its input


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bytes_become_the_stems_input_by_one_kernel(layout):
    torch.manual_seed(2)  # of others, a sum is 4e-6 off its ReLU's kink
    pixels = torch.randint(256, (2, 3, 40, 48), dtype=torch.uint8, device=DEVICE)
    pixels = pixels.contiguous(memory_format=layout)
    exact = step(plain(make()), pixels.double() / 255)
    assert_near(step(make("definitions").double(), pixels), exact, 1e-6)
    with recorded_launches() as launches:
        assert_near(step(make(), pixels), exact, 1e-4)
    assert launches[0].kernel.__name__ == "stem_input"


def test_one_buffer_per_convolution_is_kept():
    """The stem's input, each convolution's output, each block's output but the last: no more."""
    model, x = make(layers=(2, 1, 1, 1)).to(memory_format=torch.channels_last), images()
    outputs, hooked = [], plain(model)
    for module in hooked.body.modules():
        if isinstance(module, nn.Conv2d) or type(module).__name__ in ("BasicBlock", "Bottleneck"):
            module.register_forward_hook(lambda _m, _i, y: outputs.append(y.numel() * 4))
    stem = []
    hooked.body.conv1.register_forward_hook(lambda _m, i, _y: stem.append(i[0].numel()))
    hooked(x.double())
    saved = {}
    for recompute in ("none", "activations"):
        model.runner = Runner("triton", recompute)
        alive = live_after(lambda: model(x), [x, *model.parameters()])
        saved[recompute] = sum(size for _, size in alive)
    expected = sum(outputs[:-1]) + 4 * stem[0]
    assert saved["activations"] == pytest.approx(expected, rel=0.03)  # and a bit a join, and gates
    assert saved["none"] > 1.2 * saved["activations"]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("impl", ["definitions", "plain"])
def test_checkpointed_models_commit_statistics_once(impl, early_stop):
    """Run backward twice; without early stop, backward repeats a block's whole forward."""
    expected, model = step(make(impl).double(), images(torch.float64)), make(impl).double()
    model.set_grad_checkpointing()
    with set_checkpoint_early_stop(early_stop):
        y = model(images(torch.float64))
        (0.5 * y.square().mean()).backward(retain_graph=True)
        (0.5 * y.square().mean()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_near({"logits": y.detach(), **grads, **dict(model.named_buffers())}, expected, 1e-12)


def contiguous(t):  # as `save_on_cpu(pin_memory=True)`
    return t.contiguous().clone()


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def apart(t):
    """Return equal values as a part of a tensor with one more channel."""
    dim = 1 if t.dim() == 4 else t.dim() - 1
    return torch.cat([t, t.narrow(dim, 0, 1)], dim).narrow(dim, 0, t.shape[dim])


@pytest.mark.parametrize(
    ("hook", "layout", "recompute"),
    [
        *((contiguous, "nhwc", recompute) for recompute in ("none", "activations")),
        *((channels_last, "nchw", recompute) for recompute in ("none", "activations")),
        *((apart, layout, "activations") for layout in ("nchw", "nhwc")),
    ],
)
def test_saved_tensor_hooks_that_change_strides_leave_gradients_exact(hook, layout, recompute):
    model = make("triton", recompute, drop_path_rate=0.3).to(memory_format=LAYOUTS[layout])
    x = images().contiguous(memory_format=LAYOUTS[layout])
    exact = step(plain(model), x.double())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook):
        assert_near(step(model, x), exact, 1e-4)


def test_a_second_backward_and_saved_tensor_hooks():
    model, parts = make("definitions"), []
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(images()).square().sum(), parameters)
    with torch.autograd.graph.save_on_cpu():
        loss = model(images()).square().sum()
    for keep in (True, False):
        parts += (torch.autograd.grad(0.5 * loss, parameters, retain_graph=keep),)
    for first, second, whole in zip(*parts, expected, strict=True):
        torch.testing.assert_close(first + second, whole)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_shared_convolution_has_the_sum_of_its_gradients():
    ours = make("definitions", **{**PADDED["l"], "layers": (3, 2, 1, 1)}).double()
    ours.body.layer1[2].conv1.conv.weight = ours.body.layer1[1].conv1.conv.weight
    exact = step(plain(ours), images(torch.float64))
    assert_near(step(ours, images(torch.float64)), exact, 1e-10)


def test_weights_of_a_functional_call_are_freed_by_backward():
    model = make("definitions")
    weights = {name: parameter * 1 for name, parameter in model.named_parameters()}
    references = [weakref.ref(weight) for weight in weights.values()]
    loss = torch.func.functional_call(model, weights, (images(),)).sum()
    del weights
    loss.backward()
    assert not any(reference() is not None for reference in references)


def test_a_parameter_changed_between_forward_and_backward_is_an_error():
    model = make("definitions").to(memory_format=torch.channels_last)
    loss = model(images()).sum()
    with torch.no_grad():
        model.body.layer3[0].conv2.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("impl", ["triton", "definitions"])
def test_second_derivatives_are_an_error_before_anything_is_computed(impl):
    model = make(impl)
    with pytest.raises(InputError, match="norm='batchnorm', or leave create_graph=True out"):
        torch.autograd.grad(model(images()).sum(), list(model.parameters()), create_graph=True)


def test_batched_gradients_are_refused():
    logits = (model := make())(images())
    parameters, batch = list(model.parameters()), torch.ones(2, *logits.shape)

    def gradients(grad, batched=False):
        return torch.autograd.grad(logits, parameters, grad, True, is_grads_batched=batched)

    for refused in (lambda: gradients(batch, True), lambda: torch.vmap(gradients)(batch)):
        with pytest.raises(InputError, match="impl='plain', or leave is_grads_batched=True"):
            refused()


def test_a_norm_is_two_passes_and_joins_add_no_two_gradients():
    model = make(layers=(2, 1, 1, 1)).to(memory_format=torch.channels_last)
    with Recorder() as forward, recorded_launches() as launches:
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


def test_a_shortcut_may_lie_otherwise_than_what_it_joins_and_its_gradient_may_be_expanded():
    stage = make().body.layer2.to(memory_format=torch.contiguous_format)
    stage[0].conv2.to(memory_format=torch.channels_last)
    x = torch.rand(2, 16, 6, 12, device=DEVICE)[:, 4:12, :, ::2]  # with holes
    exact = copy.deepcopy(stage).double()
    outputs = (
        run_children([("stage", stage)], x, ("stage",), runner=Runner("triton"))["stage"],
        exact(x.double()),
    )
    grads, expected = (
        torch.autograd.grad((y * torch.arange(3, device=DEVICE)).mean(), list(part.parameters()))
        for y, part in zip(outputs, (stage, exact), strict=True)
    )
    for ours, value in zip(grads, expected, strict=True):
        assert (ours.double() - value).norm() <= 1e-4 * value.norm()
