import json

import pytest
import safetensors
import timm
import torch
from timm.layers.ml_decoder import MLDecoder, add_ml_decoder_head
from timm.utils.model import freeze
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

from tests.toys import CLASSES, LAYERS, PLANES, same, small, snapshot, trained
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.checkpoints.save import computed_by_timm, save_checkpoint
from tresnet.errors import CheckpointError, InputError
from tresnet.models.heads import _DecoderLayers
from tresnet.models.tresnet import feature_extractor

SUFFIXES = [".safetensors", ".pth", ".pt"]


def timm_model(**kwargs):
    from timm.models.tresnet import TResNet

    options = {"num_classes": CLASSES, "width_factor": PLANES / 64} | kwargs
    return TResNet(list(LAYERS), **options)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact_and_says_what_built_the_model(tmp_path, suffix, dtype):
    path = tmp_path / f"a{suffix}"
    model = trained(small(block_size=2, in_chans=1, dtype=dtype))
    model.set_slopes(1e-6, 0.25)
    model.body.layer3 = torch.compile(model.body.layer3)
    model.body.register_buffer("scratch", torch.ones(1), persistent=False)
    save_checkpoint(torch.compile(model), path, metadata={"classes": tuple("abcde"), "top1": 98.5})
    other = small(block_size=2, in_chans=1, dtype=dtype)
    other.body.layer3 = torch.compile(other.body.layer3)
    load_checkpoint(other, path)
    assert create(weights=path).config == model.config
    assert same(model.state_dict(), other.state_dict())
    assert (other.config.stem_slope, other.config.block_slope) == (1e-6, 0.25)
    assert other.body.layer2[0].conv1.bn.slope == 0.25
    if suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as file:
            stored = json.loads(file.metadata()["tresnet"])
    else:
        stored = torch.load(path, weights_only=True)["tresnet"]
    assert stored["format_version"] == 2
    assert stored["tresnet_version"]
    assert stored["variant"] == "tresnet_m"
    assert stored["config"] == model.config.to_dict()
    assert stored["user"] == {"classes": list("abcde"), "top1": 98.5}
    assert stored["pretrained_cfg"]["input_size"] == [1, 224, 224]


def test_our_metadata_are_read_inside_other_dicts(tmp_path):
    model = trained(small())
    model.set_slopes(1e-6, 0.25)
    save_checkpoint(model, tmp_path / "a.pth")
    torch.save({"best": torch.load(tmp_path / "a.pth"), "epoch": 3}, tmp_path / "b.pth")
    assert create(weights=tmp_path / "b.pth").config == model.config
    torch.save({"tresnet": model.state_dict()}, tmp_path / "c.pth")  # the key of our metadata
    assert same(create(weights=tmp_path / "c.pth").state_dict(), model.state_dict())


def test_files_of_equal_models_are_equal(tmp_path):
    model = small()
    for number in range(8):
        save_checkpoint(model, tmp_path / f"{number}.safetensors")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_timm_loads_its_format_strictly(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    model = trained(small()).eval()
    save_checkpoint(model, path, format="timm")
    peer = timm_model().eval()
    timm.models.load_checkpoint(peer, str(path), strict=True)
    assert same(model.state_dict(), peer.state_dict())
    x = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(model(x), peer(x))


def test_timms_format_warns_of_the_pool_that_it_does_not_hold(tmp_path, caplog):
    save_checkpoint(small(), tmp_path / "a.pth", format="timm")
    assert not caplog.text
    save_checkpoint(small(global_pool="max"), tmp_path / "b.pth", format="timm")
    assert "b.pth does not hold global_pool='max': give it to the model that loads" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "slopes", "message"),
    [
        ({}, (1e-6, 1e-6), r"stem_slope=1e-06 \(timm's has 0.01\), block_slope=1e-06"),
        ({"block_size": 2}, (1e-2, 1e-3), r"block_size=2 \(timm's has 4\)"),
        ({"head": "group_attention"}, (1e-2, 1e-3), "head='group_attention' \\(timm has only lin"),
        ({"head": "bottleneck"}, (1e-2, 1e-3), r"'bottleneck' \(timm has only linear and ml_decod"),
    ],
)
def test_refuses_what_timm_would_compute_otherwise(tmp_path, kwargs, slopes, message):
    model = small(**kwargs)
    model.set_slopes(*slopes)
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(model, tmp_path / "a.pth", format="timm")
    assert not list(tmp_path.iterdir())
    assert not computed_by_timm(model)
    assert computed_by_timm(small())
    assert not computed_by_timm(small("tresnet_s", block_size=4)), "timm has none"
    assert not computed_by_timm(small(head="ml_decoder")), "timm's create_model has no such head"


@pytest.mark.parametrize(
    ("classes", "options", "missing"),
    [
        (5, {}, ""),
        (120, {}, ""),
        (37, {"head_queries": 5}, "num_of_groups=5: give"),
        (9, {"head_queries": 4, "head_channels": 64}, "num_of_groups=4 and decoder_embedding=64: "),
    ],
)
def test_timm_loads_a_decoder_by_its_own_names(tmp_path, caplog, classes, options, missing):
    """And its state dict is read, as its decoder's."""
    path, ours = tmp_path / "a.pth", small(head="ml_decoder", num_classes=classes, **options)
    save_checkpoint(trained(ours).eval(), path, format="timm")
    assert (f"a.pth does not hold {missing}" in caplog.text) if missing else not caplog.text
    peer = add_ml_decoder_head(timm_model(num_classes=classes))
    if missing:
        queries, width = options["head_queries"], options.get("head_channels", 768)
        peer.head = MLDecoder(classes, queries, width, peer.num_features)
    timm.models.load_checkpoint(peer, str(path), strict=True)
    peer.head.decoder = _DecoderLayers(peer.head.decoder.layers)  # for torch's later versions
    x = torch.rand(2, 3, 64, 96)
    torch.testing.assert_close(peer.eval()(x), ours(x), rtol=1e-4, atol=1e-4)
    torch.save({"state_dict": peer.state_dict()}, path)
    again = create(weights=path)
    assert same(again.state_dict(), ours.state_dict())
    assert again.config.head_queries == options.get("head_queries")
    with pytest.raises(CheckpointError, match=f"has {classes} classes, got num_classes=8"):
        create(weights=path, num_classes=8)
    again = create(weights=path, num_classes=8, new_head=True)
    assert (again.config.head, again.num_classes) == ("ml_decoder", 8)


def test_inplace_abn_weights_are_saved_as_gammas(tmp_path):
    pytest.importorskip("inplace_abn")
    model = trained(small(norm="inplace_abn"))
    with torch.no_grad():
        model.body.conv1.bn.weight[0] = -0.3  # as an optimizer step can leave it
    save_checkpoint(model, tmp_path / "a.safetensors")
    other = small()
    load_checkpoint(other, tmp_path / "a.safetensors")
    assert other.body.conv1.bn.weight[0].item() == pytest.approx(0.3 + 2e-5)
    assert all(m.weight.min() >= 1e-5 for m in other.modules() if hasattr(m, "running_var"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_views_and_memory_formats(tmp_path, suffix):
    model = trained(small()).to(memory_format=torch.channels_last)
    base = torch.randn(1000, model.num_features)
    model.head.fc.weight = nn.Parameter(base[:CLASSES])  # a view of a larger storage
    before = snapshot(model)
    save_checkpoint(model, tmp_path / f"a{suffix}")
    other = small()
    load_checkpoint(other, tmp_path / f"a{suffix}")
    assert same(before, other.state_dict())
    bytes_used = sum(t.numel() * t.element_size() for t in before.values())
    assert (tmp_path / f"a{suffix}").stat().st_size < 1.1 * bytes_used + 40_000


@pytest.mark.parametrize("layers", [["body.layer1"], []])
@pytest.mark.parametrize("format", ["tresnet", "timm"])
def test_layers_that_timm_froze_are_saved_and_loaded(tmp_path, layers, format):
    """timm's freeze replaces norms by torchvision's FrozenBatchNorm2d, which counts no batches."""
    model, path = trained(small("tresnet_m")).eval(), tmp_path / "a.pth"
    x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    freeze(model, layers)
    save_checkpoint(model, path, format=format)
    torch.testing.assert_close(create(weights=path).eval()(x), expected, rtol=1e-4, atol=1e-4)
    other = small("tresnet_m").eval()
    freeze(other, layers)
    load_checkpoint(other, path)
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-4)
    torch.save(model.state_dict(), path)  # as timm's own trainer saves it
    torch.testing.assert_close(create(weights=path).eval()(x), expected, rtol=1e-4, atol=1e-4)


def conv(model):
    return model.body.layer2[0].conv1.conv


def changed(change):
    model = small()
    change(model)
    return {"model": model}


BIAS = torch.zeros(CLASSES)
CHANGES = [
    (
        lambda model: setattr(model.head, "fc", nn.Linear(model.num_features, 9)),
        r"of another shape: head.fc.weight \(expected \(5, 512\), got \(9, .* by reset_cl",
    ),
    (
        lambda model: prune.l1_unstructured(conv(model), "weight", 0.3),
        r"1 missing: body.layer2.0.conv1.conv.weight, 2 unknown: .* call torch.nn.utils.prune",
    ),
    (
        lambda model: parametrizations.weight_norm(conv(model)),
        r"call torch.nn.utils.parametrize.remove_parametrizations\(layer, 'weight'\)",
    ),
    (lambda model: nn.utils.spectral_norm(conv(model)), "call .*remove_spectral_norm"),
    (
        lambda model: setattr(model.head.fc, "bias", nn.Parameter(TwoTensor(BIAS, BIAS))),
        "head.fc.bias as TwoTensor",
    ),
    (lambda model: model.to(torch.float8_e4m3fn), "weight as torch.strided of torch.float8"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "onnx"}, "unknown format 'onnx': expected one of timm, tresnet"),
        ({"name": "a.bin"}, r"ending in .safetensors, .pth, .pt, got .*a.bin"),
        ({"metadata": {"fn": print}}, "expected metadata of numbers, strings.* not JSON"),
        ({"metadata": {"top1": float("nan")}}, "Out of range float"),
        ({"metadata": {"class_names": []}}, "as metadata 'classes', got 'class_names'"),
        ({"metadata": {"classes": "abcde"}}, "classes as a list of names, got 'abcde'"),
        ({"format": "timm", "metadata": {"top1": 1}}, r"no place for metadata, got \['top1'\]"),
        ({"model": nn.Linear(1, 1)}, "expected a TResNet from tresnet.create, got Linear"),
        ({"model": small(device="meta")}, "conv1.conv.weight as torch.strided of .* on meta"),
        ({"model": feature_extractor(small(), [1])}, r"got \d+ missing: body.layer2.0."),
        *((changed(change), message) for change, message in CHANGES),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, arguments, message):
    arguments = {"model": small(), "name": "a.pth", **arguments}
    model, path = arguments.pop("model"), tmp_path / arguments.pop("name")
    with pytest.raises(InputError, match=message):
        save_checkpoint(model, path, **arguments)
    assert not list(tmp_path.iterdir())
