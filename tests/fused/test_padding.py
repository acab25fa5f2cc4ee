"""Models of odd widths, padded: what plain modules in float64 give, and no padding is left."""

import copy

import pytest
import torch
from torch import nn

import tresnet
from tests.fused.models import PADDED, assert_near, make, plain, step
from tests.live_storages import Births
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet import fused
from tresnet.fused import padding
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.surgery import fold


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(padding, "FROM", 0)


def images(dtype=torch.float32, batch=2):
    torch.manual_seed(1)
    x = torch.rand(batch, 3, 40, 48).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last)


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


@pytest.mark.filterwarnings("ignore:body.layer2 runs as plain modules")
@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_equal_the_plain_modules(change):
    ours = make("reference", **PADDED["xl"]).double()
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
        fused.run({"part": part}, torch.rand(2, 48, 8, 8), fused.How("reference"))


def test_all_maps_are_padded_from_stem_to_the_last_stage():
    for name, model in PADDED.items():
        found = widths(recorded(make("reference", **model), images()))
        assert {width for width in found if width % 8} == set(), name
        assert 24 in found


def test_nothing_padded_is_left():
    """Gradients are dense as their parameters are, and no storage of a padded size lives on."""
    model = make("reference", **PADDED["xl"]).to(memory_format=torch.channels_last)
    with Births() as births:
        step(model, images())
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
        if parameter.dim() > 1:
            assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * 4, name
    shapes = {tuple(p.shape) for p in model.parameters()}
    assert {tuple(shape) for shape, _ in births.survivors(list(model.parameters()))} <= shapes


def test_maps_that_leave_have_the_models_channels_and_whole_gradients():
    found = []
    ours = make("reference", **PADDED["xl"]).double()
    for which in (ours, plain(ours)):
        y, maps = which.forward_intermediates(images(torch.float64))
        assert [m.shape[1] for m in maps] == [info["num_chs"] for info in which.feature_info]
        loss = y.square().sum() + sum(m.square().sum() for m in maps)
        found.append([*maps, *torch.autograd.grad(loss, list(which.body.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)


def test_small_inputs_groups_and_norms_that_would_divide_by_zero_are_not_padded(monkeypatch):
    model = make("reference", **PADDED["l"])
    model.body.layer2[0].conv1.bn.eps = 0.0
    found = widths(recorded(model, images()))
    assert {19, 24} <= found  # the first stage pads, the second does not
    monkeypatch.setattr(padding, "FROM", 1 << 40)
    assert 24 not in widths(recorded(make("reference", **PADDED["l"]), images()))


def test_aligned_models_run_what_they_ran(monkeypatch):
    names = []
    for start in (0, 1 << 40):
        monkeypatch.setattr(padding, "FROM", start)
        names.append(recorded(make("reference"), images()).names())
    assert names[0] == names[1]


@pytest.mark.parametrize("merged", [False, True])
def test_folded_models_lie_in_padded_memory_and_no_call_pads_them(merged):
    model = make(**PADDED["xl"]).eval().to(memory_format=torch.channels_last)
    folded = fold(model, merge_stem=merged)
    exact = copy.deepcopy(model).double()
    exact.set_impl("auto")
    with torch.no_grad(), Recorder() as recorder:
        ours = folded(images())
    torch.testing.assert_close(ours.double(), exact(images().double()), rtol=1e-4, atol=1e-5)
    names = set(recorder.names())
    assert not {"copy_", "_foreach_copy_", "new_zeros", "constant_pad_nd"} & names
    assert not any(width % 8 for width in widths(recorder) if width > 3)
    # a copy of it lies elsewhere; so does one whose weights were converted or loaded
    others = [copy.deepcopy(folded), fold(make(**PADDED["xl"]).eval(), merge_stem=merged).double()]
    others[0].load_state_dict(folded.state_dict())
    others[1].load_state_dict(folded.state_dict())
    for other in (*others, others[1].float()):
        other.set_impl("reference")
        with torch.inference_mode():
            y = other(images(next(other.parameters()).dtype))
        torch.testing.assert_close(y.double(), ours.double(), rtol=1e-4, atol=1e-5)
    plainly = tresnet.create(**PADDED["xl"], num_classes=5)
    assert folded.state_dict()["body.conv1.conv.weight"].shape[0] == plainly.config.planes


def test_a_new_value_in_a_folded_weight_counts_and_the_zeros_stay():
    folded = fold(make("reference", **PADDED["xl"]).eval())
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.fill_(0.01)
    exact = copy.deepcopy(folded).double()
    exact.set_impl("auto")
    with torch.inference_mode():
        ours, expected = folded(images()), exact(images().double())
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
