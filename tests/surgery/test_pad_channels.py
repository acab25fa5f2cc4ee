"""Padded models are the unpadded ones: outputs, training, features and checkpoints."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import tresnet
from tests.checkpoints.small import same, snapshot
from tests.surgery.networks import ODD_WIDTH, features, images, network
from tresnet.checkpoints.remap import read_weights
from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.models.features import FeatureExtractor
from tresnet.models.zoo import build
from tresnet.surgery import fold, pad_channels, unpad_channels

SIZES = {"width_factor": ODD_WIDTH, "num_classes": 7, "layers": (1, 2, 1, 2)}  # of `network`
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}


def padding(model):
    """Yield the name and the padded part of each widened tensor, as one flat tensor."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, shape in model.unpadded_shapes.items():
        outside = torch.ones_like(tensors[name], dtype=torch.bool)
        outside[tuple(map(slice, shape))] = False
        yield name, tensors[name][outside]


@pytest.mark.parametrize(("norm", "multiple"), [("abn", 8), ("batchnorm", 24), ("inplace_abn", 8)])
def test_the_outputs_are_the_same(norm, multiple):
    model = network(norm=norm).double()
    x = images(torch.double)
    padded = pad_channels(model, multiple)
    with torch.no_grad():
        torch.testing.assert_close(padded(x), model(x), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(features(padded, x), features(model, x), rtol=1e-10, atol=1e-12)
    assert padded.feature_info == model.feature_info


@pytest.mark.parametrize(("name", "widths"), [("tresnet_l", {76: 80}), ("tresnet_xl", {83: 88})])
def test_the_published_widths(name, widths):
    model = build(name, device="meta")
    padded = pad_channels(model)
    sizes = {n for m in padded.modules() if isinstance(m, nn.Conv2d) for n in m.weight.shape[:2]}
    assert all(n % 8 == 0 for n in sizes)
    assert padded.body.conv1.conv.out_channels == widths[model.config.planes]
    assert padded.head.fc.in_features == model.num_features


@pytest.mark.parametrize(
    ("norm", "optimizer"), [("abn", "sgd"), ("batchnorm", "adamw"), ("inplace_abn", "adamw")]
)
def test_training_keeps_them_equal_and_the_padding_zero(norm, optimizer):
    model = network(norm=norm).double().train()
    padded = pad_channels(model)
    steps = [OPTIMIZERS[optimizer](m.parameters()) for m in (model, padded)]
    for _ in range(4):
        x, target = images(torch.double, batch=3), torch.randint(7, (3,))
        for which, step in zip((model, padded), steps, strict=True):
            step.zero_grad()
            nn.functional.cross_entropy(which(x), target).backward()
            step.step()
        gradients = {name: p.grad for name, p in padded.named_parameters()}
        for name, shape in padded.unpadded_shapes.items():
            if name in gradients:
                outside = gradients[name].clone()
                outside[tuple(map(slice, shape))] = 0
                assert not outside.any(), name
    checked = 0
    for name, values in padding(padded):
        if name.endswith("running_var") or (norm == "inplace_abn" and name.endswith("bn.weight")):
            continue
        assert not values.any(), name
        checked += 1
    assert checked > 20
    restored = unpad_channels(padded).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(restored[name], value, rtol=1e-8, atol=1e-10, msg=name)
    torch.testing.assert_close(padded.eval()(x), model.eval()(x), rtol=1e-8, atol=1e-9)


def test_a_vanished_variance_of_the_padding_does_no_harm():
    model = network().double()
    padded, x = pad_channels(model), images(torch.double)
    with torch.no_grad():
        for module in padded.modules():
            if hasattr(module, "running_var"):
                module.running_var[module.weight == 0] = 0
    torch.testing.assert_close(padded(x), model(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fold(padded)(x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoints_are_those_of_the_unpadded_model(suffix, tmp_path):
    model, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    padded = pad_channels(other)
    tresnet.save_checkpoint(model, tmp_path / f"plain{suffix}")
    tresnet.load_checkpoint(padded, tmp_path / f"plain{suffix}")
    assert same(unpad_channels(padded).state_dict(), model.state_dict())
    assert all(not v.any() for name, v in padding(padded) if not name.endswith("running_var"))
    tresnet.save_checkpoint(padded, tmp_path / f"padded{suffix}")
    files = [read_weights(tmp_path / f"{which}{suffix}") for which in ("plain", "padded")]
    assert files[0].metadata == files[1].metadata
    assert same(files[0].tensors, files[1].tensors)
    assert same(tresnet.create(weights=tmp_path / f"padded{suffix}").state_dict(), snapshot(model))


def initialised(model):
    """As many scripts do it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return model


@pytest.mark.parametrize("norm", ["abn", "inplace_abn"])
def test_padding_that_is_initialised_is_refused_and_loading_clears_it(norm, tmp_path):
    model, x = network(norm=norm), images()
    tresnet.save_checkpoint(model, tmp_path / "plain.safetensors")
    padded = initialised(pad_channels(model))
    for leaves_out in (unpad_channels, fold, lambda m: tresnet.save_checkpoint(m, "new.pth")):
        with pytest.raises(InputError, match=r"channels that are zero, got others behind body\.c"):
            leaves_out(padded)
    tresnet.load_checkpoint(padded, tmp_path / "plain.safetensors")
    torch.testing.assert_close(padded(x), model(x), rtol=1e-4, atol=1e-4)
    assert same(unpad_channels(padded).state_dict(), model.state_dict())
    empty = build("tresnet_t", norm=norm, pad=8, device="meta", **SIZES).to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(7)
    tresnet.load_checkpoint(empty, tmp_path / "plain.safetensors")
    torch.testing.assert_close(empty.eval()(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_load_that_fails_leaves_the_padded_model_alone(tmp_path):
    tresnet.save_checkpoint(network(num_classes=5), tmp_path / "five.pth")
    padded = pad_channels(network())
    before = snapshot(padded)
    with pytest.raises(tresnet.TResNetError, match="It has 5 classes, expected 7"):
        tresnet.load_checkpoint(padded, tmp_path / "five.pth")
    assert same(padded.state_dict(), before)


def test_its_own_state_dict_and_copies():
    padded, x = pad_channels(network(layers=(1, 1, 1, 1))), images()
    other = pad_channels(network(norm="batchnorm", layers=(1, 1, 1, 1)))
    other.load_state_dict(padded.state_dict())
    expected = padded(x)
    for which in (other, copy.deepcopy(padded), pickle.loads(pickle.dumps(padded))):
        assert torch.equal(which(x), expected)
        assert which.unpadded_shapes == padded.unpadded_shapes
    torch.testing.assert_close(torch.jit.script(padded)(x), expected)
    torch.testing.assert_close(torch.export.export(padded, (x,)).module()(x), expected)


def test_memory_format_and_frozen_parameters_stay():
    model = network().to(memory_format=torch.channels_last)
    model.body.conv1.requires_grad_(False)
    padded = pad_channels(model)
    weight = padded.body.layer1[0].conv1.conv.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.shape[1] == 24
    assert not padded.body.conv1.conv.weight.requires_grad
    assert padded.body.conv1.bn.bias.shape == (24,)
    assert weight.requires_grad


def test_padding_again_starts_from_the_unpadded_model():
    model = network()
    twice = pad_channels(pad_channels(model, 32), 8)
    once = pad_channels(model, 8)
    assert twice.unpadded_shapes == once.unpadded_shapes
    assert same(twice.state_dict(), once.state_dict())
    assert same(unpad_channels(twice).state_dict(), model.state_dict())
    assert pad_channels(model, 8, inplace=True) is model
    assert same(model.state_dict(), once.state_dict())


def test_a_feature_extractor_pads_its_model():
    extractor = FeatureExtractor(network(), (0, 1, 2)).double().eval()
    padded = pad_channels(extractor)
    x = images(torch.double)
    assert padded.model.body.conv1.conv.out_channels == 24
    torch.testing.assert_close(padded(x), extractor(x), rtol=1e-10, atol=1e-12)
    assert padded.model.forward_features(x).shape[1] == extractor.model.num_features


def with_norms(make):
    model = network(layers=(1, 1, 1, 1))
    for module in model.modules():
        if isinstance(module, ConvNormAct):
            module.bn = make(module.bn.num_features)
    return model


def test_norms_without_running_statistics():
    model, x = with_norms(partial(nn.BatchNorm2d, track_running_stats=False)), images()
    padded = pad_channels(model)
    torch.testing.assert_close(padded(x), model(x), rtol=1e-4, atol=1e-5)
    assert same(unpad_channels(padded).state_dict(), model.state_dict())


class Shifted(nn.BatchNorm2d):
    """Of which zeros do not stay zero."""

    def forward(self, input):
        return super().forward(input) + 1


@pytest.mark.parametrize("make", [Shifted, partial(nn.BatchNorm2d, affine=False)])
def test_norms_that_might_not_leave_zeros_zero_are_refused(make):
    with pytest.raises(InputError, match=r"with weights in body\.conv1, got Conv2d and"):
        pad_channels(with_norms(make))


def test_what_cannot_be_padded():
    with pytest.raises(InputError, match="expected pad as a whole number of at least 1"):
        pad_channels(network(), True)
    with pytest.raises(InputError, match=r"expected a TResNet from tresnet\.create, got Linear"):
        pad_channels(nn.Linear(2, 2))
    with pytest.raises(InputError, match="pad before folding"):
        pad_channels(fold(network()))
    with pytest.raises(InputError, match=r"change the model first, then torch\.compile"):
        pad_channels(torch.compile(network()))
    with pytest.raises(InputError, match="got one without padding"):
        unpad_channels(network())


def test_one_gate_for_all_channels_stays_one():
    model, x = network().double(), images(torch.double)
    se = model.body.layer1[0].se
    se.fc2 = nn.Conv2d(se.fc1.out_channels, 1, 1).double()
    with torch.no_grad():
        torch.testing.assert_close(pad_channels(model, 32)(x), model(x), rtol=1e-10, atol=1e-10)
