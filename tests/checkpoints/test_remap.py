import pytest
import torch

from tests.checkpoints.small import CLASSES, LAYERS, PLANES, small, small_public
from tresnet.checkpoints.read import read_weights
from tresnet.checkpoints.remap import identify, to_ours
from tresnet.errors import CheckpointError
from tresnet.models.zoo import VARIANTS, build

# one line per kind of key of the public format: name, ours
EXAMPLES = [
    ("body.conv1.0.weight", "body.conv1.conv.weight"),
    ("body.conv1.1.running_var", "body.conv1.bn.running_var"),
    ("body.layer1.0.conv2.1.bias", "body.layer1.0.conv2.bn.bias"),
    ("body.layer2.0.conv1.0.0.weight", "body.layer2.0.conv1.conv.weight"),
    ("body.layer2.0.conv1.0.1.running_mean", "body.layer2.0.conv1.bn.running_mean"),
    ("body.layer2.0.downsample.1.0.weight", "body.layer2.0.downsample.1.conv.weight"),
    ("body.layer2.0.downsample.1.1.bias", "body.layer2.0.downsample.1.bn.bias"),
    ("body.layer3.10.conv3.1.num_batches_tracked", "body.layer3.10.conv3.bn.num_batches_tracked"),
    ("body.layer1.0.se.fc1.weight", "body.layer1.0.se.fc1.weight"),
    ("head.fc.bias", "head.fc.bias"),
]


def read(tensors, tmp_path):
    path = tmp_path / "a.pth"
    torch.save(tensors, path)
    return to_ours(read_weights(path))


@pytest.mark.parametrize(("public", "ours"), EXAMPLES)
def test_public_names(tmp_path, public, ours):
    weights = read({"body.conv1.0.weight": torch.ones(1), public: torch.ones(3)}, tmp_path)
    assert weights.format == "public"
    assert torch.equal(weights.tensors[ours], torch.ones(3))
    assert len(weights.tensors) == len({"body.conv1.0.weight", public})


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_a_whole_public_file_has_our_names_and_gammas(tmp_path, v2, filters):
    public = small_public(v2, filters=filters)
    weights = read(public.state_dict(), tmp_path)
    ours = small("tresnet_v2_l" if v2 else "tresnet_m").state_dict()
    assert set(weights.tensors) == set(ours)
    assert all(weights.tensors[key].shape == ours[key].shape for key in ours)
    w = (
        public.body.layer2[0].conv1[0][1].weight
        if not v2
        else public.body.layer2[0].conv2[0][1].weight
    )
    name = f"body.layer2.0.conv{2 if v2 else 1}.bn.weight"
    assert (w < 0).any()
    assert (w == 0).any()
    assert torch.equal(weights.tensors[name], w.detach().abs() + 1e-5)


def test_gammas_of_half_precision_keep_the_eps(tmp_path):
    w = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float16)
    weights = read({"body.conv1.0.weight": torch.ones(1), "body.conv1.1.weight": w}, tmp_path)
    expected = torch.tensor([1.00001, 0.50001, 0.00001])
    assert torch.equal(weights.tensors["body.conv1.bn.weight"], expected)


@pytest.mark.parametrize(("v2", "slopes"), [(False, (1e-2, 1e-3)), (True, (1e-6, 1e-6))])
def test_slopes_of_the_public_format(tmp_path, v2, slopes):
    assert read(small_public(v2).state_dict(), tmp_path).slopes == slopes


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_v2_l"])
def test_slopes_of_timms_format(tmp_path, name):
    weights = read(small(name).state_dict(), tmp_path)
    assert (weights.format, weights.slopes) == ("timm", (1e-2, 1e-3))


def test_the_wrong_blur_is_refused(tmp_path):
    tensors = small_public(filters=True).state_dict()
    name = "body.layer2.0.conv1.1.op.filt"
    tensors[name] = torch.full_like(tensors[name], 1 / 9)
    with pytest.raises(CheckpointError, match=rf"{name} is not the 3x3 binomial blur"):
        read(tensors, tmp_path)
    tensors[name] = torch.ones(16, 1, 5, 5)
    with pytest.raises(CheckpointError, match=rf"{name} is not the 3x3 binomial blur"):
        read(tensors, tmp_path)


def test_two_names_for_one_tensor(tmp_path):
    tensors = small_public().state_dict()
    tensors["body.layer2.0.conv1.0.weight"] = tensors["body.layer2.0.conv1.0.0.weight"]
    with pytest.raises(CheckpointError, match=r"two tensors for one .*layer2.0.conv1.0.weight"):
        read(tensors, tmp_path)


def test_mixed_names(tmp_path):
    with pytest.raises(CheckpointError, match=r"mixes timm's names .*with those of the public"):
        read(small().state_dict() | small_public().state_dict(), tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["conv1.weight", "layer1.0.conv1.weight", "fc.weight"], "but looks like a ResNet"),
        (["cls_token", "blocks.0.attn.qkv.weight"], "but looks like a transformer"),
        (["a", "b"], r"is not a TResNet: expected names such as .* got a, b, \.\.\."),
    ],
)
def test_files_of_other_models(tmp_path, keys, message):
    with pytest.raises(CheckpointError, match=message):
        read({key: torch.ones(1) for key in keys}, tmp_path)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_identify_every_variant(name):
    found = identify(build(name, num_classes=7, device="meta").state_dict())
    assert found.variant == name
    assert found.num_classes == 7


def test_identify_what_is_no_variant():
    found = identify(small().state_dict())
    assert (found.layers, found.planes, found.num_classes) == (LAYERS, PLANES, CLASSES)
    assert found.variant is None
    assert str(found) == "a TResNet (stages 1-2-1-1, 16 base channels, 48 stem inputs, 5 classes)"
