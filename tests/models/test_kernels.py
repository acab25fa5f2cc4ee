"""Whole models on the fused kernels: equal to the plain operators, and out of the way of hooks."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tresnet
from tests.live_storages import live_after
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet.errors import InputError
from tresnet.layers.norm import ABN
from tresnet.models.tresnet import RECOMPUTE
from tresnet.ops import recompute
from tresnet.ops.abn import launch
from tresnet.surgery import fold


def make(impl="triton", **options):
    """One block of each kind and stage, no norm at zero."""
    torch.manual_seed(0)
    options = {"layers": (1, 1, 1, 1), "num_classes": 5, "width_factor": 0.125, **options}
    model = tresnet.create("tresnet_t", **options)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -1, 1)
    model.set_impl(impl)
    return model.to(DEVICE)


def step(model, x):
    """Return logits, gradients by name and running statistics of one training step."""
    y = model(x)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": y.detach(), **grads, **dict(model.named_buffers())}


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_part_that_a_user_checkpoints_gives_the_same_gradients(impl):
    x = torch.rand(2, 3, 20, 20, device=DEVICE)
    plain, checkpointed = make(impl), make(impl)
    block = checkpointed.body.layer3[0]
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    expected = step(plain, x)
    for name, value in step(checkpointed, x).items():
        if "running" not in name and "batches" not in name:  # a user's counts batches twice
            torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.slow
def test_checkpointing_changes_nothing():
    x = torch.rand(2, 3, 32, 32, device=DEVICE)
    plain, checkpointed = make(), make()
    checkpointed.set_grad_checkpointing()
    expected = step(plain, x)
    for name, value in step(checkpointed, x).items():
        assert torch.equal(value, expected[name]), name


def test_inference_equals_the_plain_one_and_takes_bytes():
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    model = make().eval()
    with torch.inference_mode():
        ours = model(images)
        model.set_impl("reference")
        torch.testing.assert_close(ours, model(images.float() / 255), rtol=1e-4, atol=1e-5)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert model(images).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"merge_stem": True}), (torch.bfloat16, {}), (torch.float32, {"pad_to": 1})],
)
def test_a_folded_model_runs_the_kernels_behind_its_convolutions(dtype, options):
    model = make().eval()
    plain = fold(model, **options).double()
    plain.set_impl("reference")
    folded = fold(model, **options).to(dtype).to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 40, 44, device=DEVICE)
    images = x.to(dtype).to(memory_format=torch.channels_last)
    with torch.no_grad(), Recorder() as recorder:
        ours = folded.forward_features(images).double()
    with torch.inference_mode():
        assert torch.equal(folded.forward_features(images).double(), ours)
        expected = plain.forward_features(x.double())
        assert (ours - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    # one pass a convolution, and none beside them
    names = recorder.names()
    assert names.count("convolution") == names.count("tresnet::abn_apply") == 14
    assert not {"add", "add_", "mul", "leaky_relu_", "relu_", "reflection_pad2d"} & set(names)


def test_a_folded_model_runs_its_modules_where_someone_looks_or_wants_gradients():
    folded, x = fold(make().eval()), torch.rand(2, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        expected = folded(x)
    x.requires_grad_()
    folded(x).sum().backward()  # the kernels behind folded convolutions have no gradient
    assert x.grad is not None
    block, seen = folded.body.layer3[0], []
    block.conv2.conv.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    with torch.inference_mode():
        torch.testing.assert_close(folded(x), expected, rtol=1e-4, atol=1e-5)
        ((given, convolved),) = seen
        conv = block.conv2.conv
        torch.testing.assert_close(convolved, conv._conv_forward(given, conv.weight, conv.bias))
        block.conv2.conv = nn.Sequential(conv)
        torch.testing.assert_close(folded(x), expected, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "downsample", nn.AdaptiveAvgPool2d(1)),
        lambda block: setattr(block.se, "fc1", nn.Conv2d(8, 64, 3, padding=1)),
        lambda block: setattr(block.se, "fc1", nn.Conv2d(8, 64, 1, groups=2)),
        lambda block: setattr(block.se, "fc2", nn.Conv2d(64, 1, 1)),
        lambda block: setattr(block.se.fc1, "bias", None),
    ],
    ids=["one pixel", "3x3", "groups", "one gate", "no bias"],
)
@pytest.mark.parametrize("folds", [True, False])
def test_parts_that_the_kernels_do_not_know_run_as_they_are(change, folds):
    ours, x = make("reference").eval(), torch.rand(2, 3, 32, 32, device=DEVICE)
    ours = fold(ours) if folds else ours
    change(ours.body.layer1[0])
    ours.to(DEVICE)
    with torch.no_grad():
        expected = ours(x)
        ours.set_impl("triton")
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


def test_folded_parts_refuse_or_pass_on_what_the_kernels_cannot_do():
    norm = ABN(4, 0.01)
    norm.set_impl("triton")
    folded = fold(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm).to(DEVICE).eval())
    batch, tangent = torch.randn(2, 1, 3, 6, 6, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(folded(batch[0]), folded(batch)[0], rtol=1e-4, atol=1e-5)
        with forward_ad.dual_level():
            dual = folded(forward_ad.make_dual(batch, tangent))
            assert forward_ad.unpack_dual(dual).tangent is not None
        folded[0].conv.bias = nn.Parameter(torch.ones(1, device=DEVICE))
        with pytest.raises(InputError, match="4 channels"):
            folded(batch)


def test_the_choice_reaches_blurs_and_the_stem(monkeypatch):
    from tresnet.ops.blur_pool import launch as blur_launch
    from tresnet.ops.space_to_depth import launch as stem_launch

    names = []
    for module, name in ((blur_launch, "blur"), (stem_launch, "stem_input")):
        kernel = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, kernel=kernel, name=name: names.append(name) or kernel(*a)
        )
    model = make().eval()
    for module in model.modules():  # someone watches: each runs by itself
        module.register_forward_hook(lambda *_: None)
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=DEVICE)
    model(images)
    assert set(names) == {"blur", "stem_input"}
    names.clear()
    model.set_impl("reference")
    model(images)
    assert names == []


def test_a_folded_model_takes_bytes():
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    for stem in (False, True):
        model = tresnet.surgery.fold(make("auto").cpu().eval(), merge_stem=stem)
        torch.testing.assert_close(model(images), model(images.float() / 255))


def test_hooks_are_called_and_see_what_they_always_saw():
    x = torch.rand(2, 16, 8, 8, device=DEVICE)
    watched = ("conv1.bn", "conv2.aa", "conv2.bn", "se", "se.fc1", "conv2", "conv3", "conv1")
    seen = {}
    for impl in ("triton", "reference"):
        block = make(impl).body.layer3[0]
        for name in watched:
            block.get_submodule(name).register_forward_hook(
                lambda m, i, o, key=(impl, name): seen.update({key: o.detach()})
            )
        block(x)
    for name in watched:
        torch.testing.assert_close(
            seen["triton", name], seen["reference", name], rtol=1e-3, atol=1e-4
        )


def adds_maps(call):
    """Whether a call sums two maps, as autograd adds the gradients of two readers."""
    function, args, *_ = call
    maps = [x for x in args[:2] if isinstance(x, torch.Tensor) and x.dim() == 4]
    return len(maps) == 2 and function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [pytest.param("activations", (2, 1, 1, 1), marks=pytest.mark.slow), ("outputs", (1, 1, 1, 2))],
)
def test_a_step_equals_the_plain_one_and_adds_no_two_gradients_of_a_join(recompute, layers):
    x = torch.rand(2, 3, 20, 20, device=DEVICE).to(memory_format=torch.channels_last)
    results, counts = [], []
    for impl in ("triton", "reference"):
        model = make(impl, layers=layers, recompute=recompute)
        model = model.to(memory_format=torch.channels_last)
        with Recorder() as recorder:
            results.append(step(model, x))
        counts.append(sum(map(adds_maps, recorder.calls)))
    assert counts[0] == 1  # the stem's output has two readers and no join
    assert counts[1] >= 2 * 5  # five blocks: one sum forward, one backward
    for name, expected in results[1].items():
        difference = (results[0][name] - expected).float().norm()
        assert difference <= 1e-4 * expected.float().norm(), name


@pytest.mark.slow
def test_a_gradient_that_a_user_asks_for_is_whole():
    x = torch.rand(2, 3, 20, 20, device=DEVICE)
    found = []
    for impl in ("triton", "reference"):
        model, seen = make(impl, layers=(1, 1, 1, 2), drop_path_rate=0.2), []
        torch.manual_seed(1)  # of the drop path
        model.body.layer4[0].register_forward_hook(
            lambda _m, _i, y, seen=seen: y.register_hook(seen.append) and None
        )
        y, maps = model.forward_intermediates(x)
        seen += torch.autograd.grad(y.square().sum(), maps)
        found.append(seen)
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).norm() <= 1e-4 * expected.norm()


def test_one_statistics_pass_and_one_apply_a_norm(monkeypatch):
    block, names = make().body.layer3[0], []
    for name in ("statistics", "apply"):
        operator = getattr(launch, name)
        monkeypatch.setattr(
            launch, name, lambda *a, run=operator, name=name: names.append(name) or run(*a)
        )
    block(torch.rand(2, 16, 8, 8, device=DEVICE))
    norms = sum(type(m).__name__ == "ABN" for m in block.modules())
    assert names.count("statistics") == names.count("apply") == norms


def test_changed_parts_are_not_bypassed():
    x = torch.rand(2, 8, 8, 8, device=DEVICE)
    block = make().body.layer1[0]
    before = block(x)
    block.se.fc1 = nn.Sequential(block.se.fc1, nn.Hardtanh(0, 1e-3))
    assert not torch.allclose(before, block(x))


def biased(block):
    block.conv2.conv.bias = nn.Parameter(torch.full((32,), 0.5, device=DEVICE))


def parametrised(block):
    nn.utils.parametrize.register_parametrization(block.conv2.conv, "weight", nn.Tanh())


def frozen_weight(block):
    block.conv2.conv.weight.requires_grad_(False)


def frozen_norm(block):
    block.conv1.bn.requires_grad_(False)


def reflecting(block):
    block.conv2.conv.padding_mode = "reflect"
    block.conv2.conv._reversed_padding_repeated_twice = (1, 1, 1, 1)


def dilated(block):
    block.conv2.conv.padding = block.conv2.conv.dilation = (2, 2)


def halved_convolution(block):
    run = block.conv2.conv._conv_forward
    block.conv2.conv._conv_forward = lambda *a: run(*a) * 0.5


class Halved(torch.Tensor):
    """A weight with convolutions of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        y = super().__torch_function__(function, types, args, kwargs or {})
        return y.as_subclass(torch.Tensor) * 0.5 if function is torch.conv2d else y


def weight_of_its_own_kind(block):
    weight = block.conv2.conv.weight.detach().as_subclass(Halved)
    block.conv2.conv.weight = nn.Parameter(weight)


# how often `apply` is launched in a step, three times of them forward: as it is, and watched
CHANGES = {
    "as it is": (lambda block: None, (3, 5)),
    "biased": (biased, (4, 5)),
    "parametrised": (parametrised, (4, 5)),
    "reflecting": (reflecting, (3, 4)),  # keeps the map with its border
    "dilated": (dilated, (3, 5)),
    "halved": (halved_convolution, (4, 5)),
    "weight of its own kind": (weight_of_its_own_kind, (4, 5)),
    "frozen weight": (frozen_weight, (3, 5)),
    "frozen norm": (frozen_norm, (3, 5)),
}


@pytest.mark.parametrize(("change", "launches"), CHANGES.values(), ids=CHANGES)
def test_a_convolution_in_the_node_of_its_norm_changes_no_bit(change, launches, monkeypatch):
    """Only where the norm's node holds it, its input is not rebuilt by a launch of its own."""
    applied, apply = [], launch.apply
    monkeypatch.setattr(launch, "apply", lambda *a: applied.append(a) or apply(*a))
    x = torch.rand(2, 128, 6, 6, device=DEVICE).to(memory_format=torch.channels_last)
    results, counts = [], []
    for watched in (False, True):
        block, seen = make(layers=(1, 1, 2, 1)).body.layer3[1], []
        change(block.to(memory_format=torch.channels_last))
        for layer in (block.conv2, block.conv3) if watched else ():
            layer.conv.register_forward_hook(lambda *a, seen=seen: seen.append(a))
        applied.clear()
        with recompute.scope(), torch.autocast(DEVICE, torch.bfloat16):
            y = block(x)
        y.float().square().sum().backward()
        counts.append(len(applied))
        assert len(seen) == 2 * watched
        results.append([y, *(p.grad for p in block.parameters()), *block.buffers()])
    assert tuple(counts) == launches
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(ours, expected)


def replaced_forward(module):
    forward = module.forward
    module.forward = lambda x: forward(x) * 0.5


def subclassed(module):
    kind = type(module)
    forward = {"forward": lambda self, x: kind.forward(self, x) * 0.5}
    module.__class__ = type("Halved", (kind,), forward)


@pytest.mark.parametrize("change", [replaced_forward, subclassed])
@pytest.mark.parametrize("name", ["conv1.bn", "conv2", "conv2.aa", "conv3.bn", "conv3", "se"])
def test_a_forward_of_another_s_making_is_not_bypassed(name, change):
    x = torch.rand(2, 16, 8, 8, device=DEVICE)
    outputs = []
    for impl in ("triton", "reference"):
        block = make(impl).body.layer3[0].eval()
        change(block.get_submodule(name))
        outputs.append(block(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_hooks_of_every_module_are_called():
    seen = {"triton": [], "reference": []}
    for impl, names in seen.items():
        block = make(impl).body.layer3[0].eval()
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_, names=names: names.append(type(module).__name__)
        )
        try:
            block(torch.rand(2, 16, 8, 8, device=DEVICE))
        finally:
            handle.remove()
    assert seen["triton"] == seen["reference"]


def test_set_impl_errors():
    with pytest.raises(InputError, match=r"expected impl 'auto', .* got 'cuda'"):
        make().set_impl("cuda")
    with pytest.raises(InputError, match="norm='abn', got 'batchnorm'"):
        tresnet.create("tresnet_t", norm="batchnorm").set_impl("triton")


@pytest.mark.slow
def test_compiles_in_one_graph():
    x = torch.rand(2, 3, 32, 32, device=DEVICE)
    eager = step(make(), x)
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, eager["logits"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-5)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, eager[name])
    more, twin = torch.rand(3, 3, 32, 32, device=DEVICE), copy.deepcopy(model)
    torch.testing.assert_close(compiled(more), twin(more))  # of whose size no graph knows


def test_exports_as_plain_operators_for_any_batch():
    model, x = make().eval(), torch.rand(3, 3, 32, 24, device=DEVICE)
    sizes = {"x": {0: torch.export.Dim("n")}}
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(target.startswith(("aten.", "<built-in")) for target in targets), targets
    larger = torch.rand(5, 3, 32, 24, device=DEVICE)
    torch.testing.assert_close(program.module()(larger), model(larger), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rebuilding_more_changes_no_gradient_and_keeps_less():
    x = torch.rand(2, 3, 20, 20, device=DEVICE)
    results, kept = [], []
    for what in RECOMPUTE:
        model, logits = make(layers=(1, 2, 1, 2)), []
        model.set_recompute(what)
        ignored = [*model.parameters(), *model.buffers(), x]
        alive = live_after(lambda model=model, logits=logits: logits.append(model(x)), ignored)
        kept.append(sum(size for _, size in alive))
        logits[0].square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in results[0].items():
        for result in results[1:]:
            torch.testing.assert_close(result[name], expected, msg=name)
    assert kept[0] > 1.2 * kept[1]
    assert kept[1] > kept[2]
