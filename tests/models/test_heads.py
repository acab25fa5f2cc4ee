"""Heads: what they compute, how they are reset, saved and loaded."""

from typing import Any

import pytest
import torch
from torch import nn

import tresnet
from tests.toys import smallest
from tresnet.errors import CheckpointError, InputError
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import make_config

HEADS: dict[str, dict[str, Any]] = {
    "linear": {},
    "group_attention": {"head_groups": (3, 1, 2), "head_channels": 16},
    "ml_decoder": {"head_channels": 16},
}


def make(head: str, num_classes: int = 6, **options: Any) -> TResNet:
    return smallest(num_classes=num_classes, head=head, **HEADS[head] | options)


def images(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32)


@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_of_every_head_learns(head):
    model = make(head)
    model(images()).square().sum().backward()
    assert [n for n, p in model.head.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("head", HEADS)
def test_reset_classifier_keeps_the_kind(head):
    model = make(head).eval()
    kind, x = type(model.head), images()
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size)
    model.reset_classifier(9)
    assert model(x).shape == (2, 9)
    assert type(model.head) is kind
    assert model.get_classifier() is model.head.fc
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
    assert isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(4)
    assert model(x).shape == (2, 4)
    assert type(model.head) is kind


def test_groups_are_kept_in_number_or_named_anew():
    model = make("group_attention")
    model.reset_classifier(8)
    assert model.config.head_groups == (3, 3, 2)
    model.reset_classifier(2)
    assert model.config.head_groups == (1, 1)
    with pytest.raises(InputError, match="pool of its own, got 'avg'"):
        model.reset_classifier(4, "avg")
    with pytest.raises(InputError, match="add up to num_classes=4"):
        model.reset_classifier(4, head_groups=(1, 1))
    model.reset_classifier(7, head_groups=(1, 6))
    assert model.config.head_groups == (1, 6)
    assert isinstance(model.head.fc, GroupedLinear)
    assert model.head.fc.out_features == (1, 6)


@pytest.mark.parametrize("head", HEADS)
def test_weights_go_into_a_model_of_other_classes_or_another_head(head, tmp_path):
    model, path = make(head), tmp_path / "model.safetensors"
    model.reset_classifier(0, "")  # no pool between two classifiers is no pool of the second
    model.reset_classifier(8, "avg" if head == "linear" else None)
    tresnet.save_checkpoint(model, path)
    other = tresnet.create(weights=path, num_classes=5, new_head=True)
    assert (other.config.head, other.num_classes) == (head, 5)
    assert other.config.head_channels == HEADS[head].get("head_channels")
    assert torch.equal(other.body.conv1.conv.weight, model.body.conv1.conv.weight)
    if head == "group_attention":
        other = tresnet.create(weights=path, head="linear", new_head=True)
        assert (other.config.head_groups, other.config.head_channels) == ((), None)
        assert other(images()).shape == (2, 8)
        with pytest.raises(CheckpointError, match=r"does not fit.*head\.attention"):
            tresnet.create(weights=path, head="linear")


def test_group_attention_is_a_maximum_of_branches_and_linear_layers():
    model = make("group_attention").double().eval()
    head = model.head
    nn.init.normal_(head.attention.conv3.bn.weight)
    x = torch.randn(2, model.num_features, 3, 4, dtype=torch.float64)
    expected = head.fc(head.attention(head.reduce(x)).amax((2, 3)))
    torch.testing.assert_close(head(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("classes", "groups", "expected"),
    [
        (26, None, (3, 3, *[2] * 10)),
        (5, None, (1,) * 5),
        (7, 3, (3, 2, 2)),
        (6, [1, 2, 3], (1, 2, 3)),
        (0, None, ()),
    ],
)
def test_classes_are_distributed_over_groups(classes, groups, expected):
    options = {"num_classes": classes, "head": "group_attention", "head_groups": groups}
    assert make_config("tresnet_t", **options).head_groups == expected
