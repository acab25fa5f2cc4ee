"""Models from names and files; files of `torch.save` are read by every model of the same layers."""

import functools

import pytest
import torch
from timm.models._features import FeatureGetterNet

import tresnet.checkpoints.describe
from tests.toys import CLASSES, LAYERS, NEEDS_PACKAGE, same, small, small_public, trained, zeros
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.locate import entries, weights_dir
from tresnet.checkpoints.save import save_checkpoint
from tresnet.errors import CheckpointError, InputError
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import VARIANTS, build


@pytest.fixture
def ours(tmp_path):
    """A file of ours that differs from the defaults wherever it can."""
    model = trained(small(block_size=2, in_chans=1, global_pool="max"))
    model.set_slopes(0.3, 0.2)
    model.pretrained_cfg |= {"input_size": (1, 48, 48), "crop_mode": "squash", "crop_pct": 0.9}
    save_checkpoint(model, tmp_path / "ours.safetensors")
    return model, tmp_path / "ours.safetensors"


@pytest.fixture
def timms(tmp_path):
    model = trained(small())
    torch.save(model.state_dict(), tmp_path / "timms.pth")
    return model, tmp_path / "timms.pth"


def test_fresh_models():
    options = {"norm": "batchnorm", "jit": True, "in_chans": 2, "num_classes": 7, "block_size": 4}
    options |= {"drop_rate": 0.1, "drop_path_rate": 0.2}
    model = create("tresnet_t", **options, dtype=torch.float64, device="meta")
    assert model.training
    assert {"variant": "tresnet_t", **options}.items() <= vars(model.config).items()
    assert (model.head.fc.weight.device.type, model.head.fc.weight.dtype) == ("meta", torch.float64)


def test_everything_comes_from_a_file_of_ours_but_for_arguments(ours):
    source, path = ours
    with pytest.raises(CheckpointError, match="holds tresnet_m, got name='tresnet_l': leave the n"):
        create("tresnet_l", weights=path)
    model = create(weights=path)
    assert model.config == source.config
    assert same(model.state_dict(), source.state_dict())
    cfg = model.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_mode"], cfg["crop_pct"]) == ((1, 48, 48), "squash", 0.9)
    assert (cfg["mean"], cfg["std"], cfg["num_classes"]) == ((0.0,), (1.0,), CLASSES)
    save_checkpoint(model, path)
    assert create(weights=path).pretrained_cfg == cfg
    model = create("tresnet_m", weights=path, in_chans=3, norm="batchnorm", drop_rate=0.5)
    config = model.config
    assert (config.in_chans, config.norm, config.drop_rate) == (3, "batchnorm", 0.5)
    assert config.block_slope == 0.2


def test_another_class_count_needs_new_head(timms):
    source, path = timms
    with pytest.raises(CheckpointError, match=r"5 classes, got num_classes=7: .* new_head=True"):
        create(weights=path, num_classes=7)
    assert create(weights=path, num_classes=CLASSES).num_classes == CLASSES
    model = create(weights=path, num_classes=7, new_head=True)
    assert (model.num_classes, model.pretrained_cfg["num_classes"]) == (7, 7)
    assert same(model.body.state_dict(), source.body.state_dict())
    model = create(weights=path, new_head=True)
    assert model.num_classes == CLASSES
    assert not torch.equal(model.head.fc.weight, source.head.fc.weight)
    headless = create(weights=path, num_classes=0)
    assert headless.num_classes == 0
    save_checkpoint(headless, path.with_name("headless.safetensors"))
    with pytest.raises(CheckpointError, match=r"has no head, so 0 classes, got num_classes=7: l"):
        create(weights=path.with_name("headless.safetensors"), num_classes=7)
    with pytest.raises(CheckpointError, match=r"meta device.*to_empty\(device=...\) before"):
        create(weights=path, device="meta")


def test_other_classes_keep_the_number_of_groups(tmp_path):
    source = small(head="group_attention", head_channels=16, head_groups=2)
    save_checkpoint(source, tmp_path / "a.pth")
    for classes, groups in ((7, (4, 3)), (1, (1,)), (0, ())):
        model = create(weights=tmp_path / "a.pth", num_classes=classes, new_head=True)
        assert model.config.head_groups == groups


def test_features_only(timms):
    source, path = timms
    model = create(weights=path, features_only=True, out_indices=(1, 3)).eval()
    assert isinstance(model, FeatureGetterNet)
    assert model.feature_info.reduction() == [4, 16]
    x = torch.rand(1, 3, 64, 64)
    expected = source.eval().forward_intermediates(x, [1, 3], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(model(x), expected, strict=True))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({}, InputError, "expected a name out of tresnet_d, .*, or weights"),
        ({"name": "tresnet_m", "pretrained": True}, InputError, r"weights=TAG.*tresnet_m.miil_in"),
        ({"name": "tresnet_m.miil_in1k"}, InputError, r"weights=TAG, .*known are tresnet_m\.mi"),
        ({"weights": "tresnet_m.miil_1k"}, InputError, r"did you mean 'tresnet_m\.miil_"),
        ({"weights": "zzz"}, InputError, "'zzz': expected one of .*or give the path"),
        ({"weights": "no.pth"}, CheckpointError, "no file of weights at no.pth"),
        ({"weights": 5}, InputError, "expected a tag or the path of weights, got int"),
        ({"weights": "a\0b.pth"}, CheckpointError, "cannot be read|no file of weights"),
        ({"weights": "x" * 5000 + ".pth"}, InputError, "expected a tag or the path of weights"),
        ({"name": "tresnet_m", "out_indices": [1]}, InputError, r"\[1\] needs features_only=True"),
        ({"name": "tresnet_m", "new_head": True}, InputError, "new_head=True needs weights"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        create(**kwargs)


SMALL = {"layers": LAYERS, "width_factor": 0.3, "num_classes": CLASSES}  # widths no kernel likes
# Options of speed and of training, which change neither parameters nor outputs.
SPEEDS = [
    {},
    {"norm": "batchnorm"},
    {"jit": True},
    {"impl": "plain"},
    {"impl": "triton"},
    {"recompute": "none"},
    {"drop_rate": 0.1, "drop_path_rate": 0.1},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    pytest.param({"norm": "inplace_abn"}, marks=NEEDS_PACKAGE),
]
# Options of the layers: those that a reader repeats, as the parameters do not tell them, last.
LAYOUTS = [
    ({}, {}),
    ({"block_size": 2}, {}),
    ({"block_size": 1}, {}),
    ({"in_chans": 1}, {}),
    ({"block_size": 2, "in_chans": 1}, {}),
    ({"num_classes": 0}, {}),
    ({"width_factor": 0.25, "layers": (2, 1, 1, 1)}, {}),
    ({"head": "ml_decoder"}, {}),
    ({"head": "ml_decoder", "head_channels": 64}, {}),
    ({"head": "group_attention", "head_channels": 16}, {}),
    ({"head": "group_attention", "head_channels": 16, "head_groups": 2}, {}),
    ({"head": "group_attention", "head_channels": 16}, {"head_groups": [1, 4]}),
    ({}, {"global_pool": "avgmax"}),
    ({}, {"stem_slope": 0.3, "block_slope": 0.2}),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.pth"


def written(path, name="tresnet_m", **options):
    model = trained(create(name, **SMALL | options))
    with torch.no_grad():  # inplace_abn has no gammas below its eps
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bn.weight"):
                parameter.abs_().add_(1e-3)
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.parametrize("options", SPEEDS, ids=str)
def test_options_of_speed_change_no_state_dict(path, options):
    plain, model = written(path).state_dict(), create(weights=path, **options)
    dtype = options.get("dtype", torch.float32)
    wanted = {k: v.to(dtype) if v.is_floating_point() else v for k, v in plain.items()}
    assert same(model.state_dict(), wanted)
    fresh = create("tresnet_m", **SMALL | options)
    fresh.load_state_dict(plain)
    assert same(fresh.state_dict(), wanted)


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_v2_l"])
@pytest.mark.parametrize(("options", "repeated"), LAYOUTS, ids=str)
def test_the_layers_follow_from_the_parameters(path, name, options, repeated, caplog):
    source = written(path, name, **options, **repeated).eval()
    model = create(weights=path, **repeated).eval()
    assert ("other sizes by head_groups" in caplog.text) == bool(source.config.head_groups)
    assert same(model.state_dict(), source.state_dict())
    x = torch.rand(2, model.config.in_chans, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), source(x))


def test_a_tag_whose_file_is_here():
    found = open_checkpoint("tresnet_t.digits")
    assert (found.entry, found.format) == (entries()["tresnet_t.digits"], "tresnet")
    assert found.path == weights_dir() / found.entry.file
    assert (found.classes, found.num_classes) == (tuple("0123456789"), 10)
    cfg = found.pretrained_cfg
    assert (cfg["input_size"], cfg["pool_size"]) == ((3, 32, 32), (2, 2))
    assert cfg["crop_mode"] == found.entry.crop_mode


@pytest.mark.parametrize("name", [*VARIANTS, "of no variant"])
def test_files_of_others(path, name):
    if name in VARIANTS:
        tensors = zeros(build(name, num_classes=9, device="meta").state_dict())
        expected = name, False, "timm", build(name, num_classes=9, device="meta").config
    else:
        tensors = small_public(v2=True).state_dict()
        expected = "tresnet_v2_l", True, "public", small("tresnet_v2_l").config
    torch.save(tensors, path)
    found = open_checkpoint(path)
    assert (found.config.variant, found.guessed, found.format, found.config) == expected


def test_a_file_is_read_described_and_built_once(timms, monkeypatch):
    calls = []

    def counted(inner, name, *args, **kwargs):
        calls.append(name)
        return inner(*args, **kwargs)

    for place, name in (
        (torch, "load"),
        (tresnet.checkpoints.describe, "_config_of_tensors"),
        (TResNet, "_make_body"),
    ):
        inner = getattr(place, name)
        partial = functools.partialmethod if place is TResNet else functools.partial
        monkeypatch.setattr(place, name, partial(functools.partial(counted, inner, name)))
    create(weights=timms[1])
    assert calls == ["load", "_config_of_tensors", "_make_body"]
