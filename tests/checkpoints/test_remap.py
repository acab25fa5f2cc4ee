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
def test_a_public_file_has_our_names_and_gammas(tmp_path, v2, filters):
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


OURS, PUBLIC = small().state_dict(), small_public(filters=True).state_dict()
BLUR = "body.layer2.0.conv1.1.op.filt"
CONV = "body.layer2.0.conv1.0"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (PUBLIC | {BLUR: torch.full((16, 1, 3, 3), 1 / 9)}, f"{BLUR} is not the 3x3 binomial blur"),
        (PUBLIC | {BLUR: torch.ones(16, 1, 5, 5)}, f"{BLUR} is not the 3x3 binomial blur"),
        (PUBLIC | {f"{CONV}.weight": PUBLIC[f"{CONV}.0.weight"]}, f"two tensors for one .*{CONV}"),
        (OURS | PUBLIC, "mixes timm's names .*with those of the public"),
        (dict.fromkeys("ab", torch.ones(1)), r"not a TResNet: expected names .* got a, b$"),
    ],
    ids=["blur", "size of the blur", "two names", "mixed names", "other names"],
)
def test_what_is_no_file_of_a_tresnet_is_refused(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        read(tensors, tmp_path)
