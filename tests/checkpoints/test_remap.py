import pytest
import torch

from tests.checkpoints.small import small, small_public
from tresnet.checkpoints.remap import read_weights
from tresnet.errors import CheckpointError


def read(tensors, tmp_path):
    path = tmp_path / "a.pth"
    torch.save(tensors, path)
    return read_weights(path)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_a_whole_public_file_has_our_names_and_gammas(tmp_path, v2, filters):
    public = small_public(v2, filters=filters)
    weights = read(public.state_dict(), tmp_path)
    assert (weights.format, weights.slopes) == ("public", (1e-6, 1e-6) if v2 else (1e-2, 1e-3))
    ours = small("tresnet_v2_l" if v2 else "tresnet_m").state_dict()
    assert set(weights.tensors) == set(ours)
    assert all(weights.tensors[key].shape == ours[key].shape for key in ours)
    block, conv = public.body.layer2[0], "conv2" if v2 else "conv1"
    w, name = getattr(block, conv)[0][1].weight, f"body.layer2.0.{conv}.bn.weight"
    assert (w < 0).any()
    assert (w == 0).any()
    assert torch.equal(weights.tensors[name], w.detach().abs() + 1e-5)


def test_gammas_of_half_precision_keep_the_eps(tmp_path):
    w = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float16)
    weights = read({"body.conv1.0.weight": torch.ones(1), "body.conv1.1.weight": w}, tmp_path)
    expected = torch.tensor([1.00001, 0.50001, 0.00001])
    assert torch.equal(weights.tensors["body.conv1.bn.weight"], expected)


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


def test_files_of_other_models(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a TResNet: expected names .* got a, b, \."):
        read({key: torch.ones(1) for key in ("a", "b")}, tmp_path)
