"""Models of odd widths, padded: what plain modules in float64 give, and no padding is left."""

import pytest
import torch
from torch import nn

from tests.fused.models import PADDED, RUNNERS, assert_near, images, make, plain
from tests.live_storages import Births
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import step
from tresnet.fused import cast_and_pad
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.models.tresnet import run_children
from tresnet.surgery import fold


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(cast_and_pad, "PAD_FROM_VALUES", 0)


def recorded(model, x):
    with Recorder() as recorder:
        model(x)
    return recorder


def widths(recorder):
    """Numbers of channels of the maps that convolutions of a call read and write."""
    calls = [call for call in recorder.calls if call[0] is torch.ops.aten.convolution.default]
    return {t.shape[1] for _, args, _, y in calls for t in (args[0], y)}


def frozen(model):
    for name in ("conv1", "layer1", "layer3.0.conv2.conv", "layer3.0.conv1.bn"):
        model.body.get_submodule(name).requires_grad_(False)


CHANGES = {
    "a hook": lambda model: model.body.layer2.register_forward_hook(lambda *_: None),
    "frozen": frozen,
    "norms in eval mode": nn.Module.eval,
    "contiguous": lambda model: model.to(memory_format=torch.contiguous_format),
    "checkpointed": lambda model: model.set_grad_checkpointing(),
}


@pytest.mark.filterwarnings("ignore:layer2 runs as plain modules")
@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_equal_the_plain_modules(change):
    ours = make("fallback", **PADDED["xl"]).double()
    CHANGES[change](ours)
    exact = plain(ours)
    exact.set_grad_checkpointing(False)
    x = images(torch.float64)
    assert_near(step(ours, x), step(exact, x), 1e-10)


def test_zeros_fill_no_missing_channels():
    part = nn.Sequential(ConvNormAct(48, 76, 3), ConvNormAct(80, 64, 1))
    with (
        pytest.warns(UserWarning, match="expected 80 channels, got 76"),
        pytest.raises(RuntimeError, match="channels"),
    ):
        run_children([("part", part)], torch.rand(2, 48, 8, 8), (), runner=RUNNERS["fallback"])


def test_a_convolution_behind_a_padded_map_reads_the_maps_own_channels():
    parts = [("stage", nn.Sequential(ConvNormAct(48, 76, 3))), ("conv", ConvNormAct(76, 64, 1))]
    x, runners = torch.rand(2, 48, 8, 8), (RUNNERS["definitions"], None)
    ours, exact = (run_children(parts, x, ("conv",), runner=each)["conv"] for each in runners)
    torch.testing.assert_close(ours, exact)


def test_all_maps_are_padded_from_stem_to_the_last_stage():
    for name, model in PADDED.items():
        sizes = widths(recorded(make("definitions", **model), images()))
        assert {width for width in sizes if width % 8} == set(), name
        assert 24 in sizes


def test_nothing_padded_is_left():
    """Gradients are dense as their parameters are, and no storage of a padded size lives on."""
    model = make("definitions", **PADDED["xl"]).to(memory_format=torch.channels_last)
    with Births() as births:
        step(model, images())
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
        if parameter.dim() > 1:
            assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * 4, name
    shapes = {tuple(p.shape) for p in model.parameters()}
    assert {tuple(shape) for shape, _ in births.survivors(list(model.parameters()))} <= shapes


def test_maps_that_leave_have_the_models_channels_and_are_what_later_stages_read():
    """Hooks of a returned map change the gradients before it, and it has a gradient itself."""
    results = []
    ours = make("definitions", **PADDED["xl"]).double()
    for which in (ours, plain(ours)):
        y, maps = which.forward_intermediates(images(torch.float64))
        assert [m.shape[1] for m in maps] == [info["num_chs"] for info in which.feature_info]
        maps[1].register_hook(lambda grad: grad * 2)
        loss = y.square().sum() + sum(m.square().sum() for m in maps)
        results.append([*maps, *torch.autograd.grad(loss, [*maps, *which.body.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)


def test_small_inputs_and_norms_that_would_divide_by_zero_are_not_padded(monkeypatch):
    model = make("fallback", **PADDED["l"])
    model.body.layer2[0].conv1.bn.eps = 1e-31
    with pytest.warns(UserWarning, match="eps=0"):
        sizes = widths(recorded(model, images()))
    assert {19, 24} <= sizes  # the first stage pads, the second does not
    monkeypatch.setattr(cast_and_pad, "PAD_FROM_VALUES", 1 << 40)
    assert 24 not in widths(recorded(make("definitions", **PADDED["l"]), images()))


@pytest.mark.parametrize("merged", [False, True])
def test_folded_models_are_padded_and_take_new_values(merged):
    model = make(**PADDED["xl"]).eval().to(memory_format=torch.channels_last)
    folded = fold(model, merge_stem=merged)
    for value in (None, 0.01):
        with torch.no_grad():
            for parameter in folded.parameters() if value else ():
                parameter.fill_(value)
        with torch.no_grad(), Recorder() as recorder:
            ours = folded(images())
        expected = plain(folded)(images(torch.float64))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
        assert not any(width % 8 for width in widths(recorder) if width > 3)
    assert folded.body.conv1.conv.weight.shape[0] == model.config.planes


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_frozen_parameters_of_a_copied_row_get_no_gradients(padded, layout, monkeypatch):
    """Weights in bfloat16 are copies in any case; in a padded model, vectors are too."""
    monkeypatch.setattr(cast_and_pad, "PAD_FROM_VALUES", 0 if padded else 1 << 40)
    ours = make("definitions", **PADDED["xl"]).to(memory_format=layout)
    for parameter in list(ours.parameters())[::3]:
        parameter.requires_grad_(False)
    exact = step(plain(ours), images(torch.float64))
    with torch.autocast(DEVICE, torch.bfloat16):
        results = step(ours, images())
    for name, parameter in ours.named_parameters():
        assert (name in results) == (name in exact) == parameter.requires_grad, name
        if parameter.requires_grad:
            assert results[name].dtype == parameter.dtype
    kinds = [
        torch.cat([g[n].flatten().double() for n, p in ours.named_parameters() if p.requires_grad])
        for g in (results, exact)
    ]
    assert (kinds[0] - kinds[1]).norm() < 0.2 * kinds[1].norm()


@pytest.mark.parametrize("padded", [True, False])
def test_the_copies_of_a_row_are_one_multi_tensor_copy_each_way(padded, monkeypatch):
    """Copies of one tensor are left where strides differ: corners of padded filters."""
    monkeypatch.setattr(cast_and_pad, "PAD_FROM_VALUES", 0 if padded else 1 << 40)
    model = make("definitions", **(PADDED["xl"] if padded else {}))
    model.to(memory_format=torch.channels_last)
    with Recorder() as forward, torch.autocast(DEVICE, torch.bfloat16):
        loss = model.forward_features(images()).float().sum()
    with Recorder() as backward:
        loss.backward()
    for recorder in (forward, backward):
        groups = [
            [(t.dtype, s.dtype, t.stride() == s.stride()) for t, s in zip(*args[:2], strict=True)]
            for func, args, *_ in recorder.calls
            if func.overloadpacket is torch.ops.aten._foreach_copy_
        ]
        # of each row: weights, and, padded, vectors, which keep their dtype
        assert len(groups) == (6 if padded else 4), groups  # two of four rows have padded vectors
        assert all(len({*group}) == 1 and group[0][2] for group in groups)
        weights = sum(len(group) for group in groups if group[0][0] != group[0][1])
        convs = sum(type(m) is nn.Conv2d and m.bias is None for m in model.body.modules())
        assert padded or weights == convs


def test_an_expanded_weight_has_the_sum_of_its_copys_gradients():
    """A functional call may give a weight whose values lie in memory once."""
    base = torch.rand(4, 3, 1, 1, requires_grad=True)
    spec = torch.bfloat16, (4, 3, 3, 3)
    (copied,) = cast_and_pad._CastAndPad.apply([spec], base.expand(-1, -1, 3, 3))
    copied.sum().backward()
    assert torch.equal(base.grad, torch.full_like(base, 9))
