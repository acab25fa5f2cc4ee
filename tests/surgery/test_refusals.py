"""Surgery drops nothing that watches or changes what it replaces: it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.toys import images, network
from tresnet.errors import InputError
from tresnet.layers.norm import ABN
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.surgery import compose, fold, merge_parallel, swap_norm


def swap_to_abn(model: nn.Module) -> nn.Module:
    return swap_norm(model, "abn")


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, y: 2 * y)


def replaced(module: nn.Module) -> None:
    module.forward = lambda x, forward=module.forward: forward(x) / 2


def hooked_backward(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, outputs: None)


CHANGES: list[tuple[str, Callable[[nn.Module], object]]] = [
    *[(name, doubled) for name in ("body.conv1", "body.conv1.conv", "body.layer2.0.conv2.bn")],
    ("body.layer1.0.conv1", lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] + 1,))),
    ("body.layer1.0.conv1", hooked_backward),
    ("body.layer3.0.conv3.bn", replaced),
    ("body.layer3.0.conv1", replaced),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_fold_refuses_what_it_would_drop(name, change):
    model = network()
    change(model.get_submodule(name))
    with pytest.raises(InputError, match=rf"{name}: .*: remove it first"):
        fold(model)


REMOVED = {
    nn.utils.weight_norm: "remove_weight_norm",
    nn.utils.spectral_norm: "remove_spectral_norm",
    nn.utils.parametrizations.weight_norm: "parametrize.remove_parametrizations",
    prune.identity: "prune.remove",
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("change", REMOVED)
@pytest.mark.parametrize("ours", [True, False])
def test_fold_says_how_to_undo_what_torch_added(change, ours):
    model: Any = network() if ours else nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    name = "body.conv1.conv" if ours else "0"
    change(model.get_submodule(name), *(["weight"] if change is prune.identity else []))
    call = rf"call torch.nn.utils.{REMOVED[change]}\(layer"
    with pytest.raises(InputError, match=rf"{name}.*: {call}"):
        fold(model)


def test_hooks_elsewhere_and_norms_of_torch_fold():
    model, x = network(width_factor=0.25), images()
    model.body.layer2.register_forward_hook(lambda module, inputs, y: 2 * y)
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    torch.testing.assert_close(fold(model)(x), model(x), rtol=1e-4, atol=1e-4)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    torch.testing.assert_close(fold(converted)(x), model(x), rtol=1e-4, atol=1e-4)


class Backwards(nn.Sequential):
    """Calls its children from the last to the first."""

    def forward(self, x):
        for child in reversed(self):
            x = child(x)
        return x


def test_only_children_that_follow_each_other_fold():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    norm.running_mean.normal_()
    twice = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(3, 3, 1), conv, norm).eval()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(fold(twice)(x), twice(x))
    reverse = nn.Sequential(Backwards(conv, nn.BatchNorm2d(3)), nn.Conv2d(3, 3, 1), norm).eval()
    nn.init.normal_(reverse[0][1].running_mean)
    torch.testing.assert_close(fold(reverse)(x), reverse(x))


@pytest.mark.parametrize("change", [doubled, replaced, hooked_backward])
def test_swap_norm_refuses(change):
    model = network()
    change(model.body.conv1.bn)
    with pytest.raises(InputError, match=r"body.conv1.bn: ABN has .*remove it first"):
        swap_norm(model, "batchnorm")
    assert type(model.body.conv1.bn) is ABN


@pytest.mark.parametrize("name", ["1", "1.low_pass"])
@pytest.mark.parametrize("change", [doubled, replaced])
def test_compose_refuses(name, change):
    model = nn.Sequential(nn.ReLU(), SubtractedConv(3, 4, 3))
    change(model.get_submodule(name))
    with pytest.raises(InputError, match=rf"{name}: .* remove it first"):
        compose(model)
    with pytest.raises(InputError, match="remove it first"):
        compose(model[1], nn.Conv2d(4, 2, 1))


class Two(nn.Module):
    """Two layers and whatever else is set."""

    def __init__(self, order: str = "ab", tied: bool = False, **settings: object) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4))
        if tied:
            self.b.weight = self.a.weight
        self.__dict__ |= settings


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(8, 4, 1))
    doubled(module[0])
    return module


def tied_norms() -> nn.Module:
    pair = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    pair[1].running_mean = pair[0].running_mean
    return pair


def pair_of(*modules: nn.Module) -> list[nn.Module]:
    """Return branches to merge: two, or copies of one."""
    return [*modules] if len(modules) > 1 else [modules[0], copy.deepcopy(modules[0])]


SHARED, LINEAR = nn.Conv2d(8, 4, 1), nn.Linear(2, 2)
FIRST, LAST = nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(6, 2, 1)
BIASED, PADDED = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 3, 3, padding=1)
REFLECTED = nn.Conv2d(6, 3, 3, padding=1, padding_mode="reflect")
CONV = nn.Conv2d(3, 4, 1)
UNTRACKED = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)).eval()


@pytest.mark.parametrize(
    ("rewrite", "arguments", "message"),
    [
        (fold, (LINEAR,), r"norm in an nn.Sequential of Linear, found none"),
        (fold, (UNTRACKED,), r"1 has none: its output depends on the batch"),
        (swap_norm, (LINEAR, "layernorm"), "unknown norm 'layernorm'"),
        (swap_norm, (LINEAR, "abn"), r"expected norms of tresnet in Linear, found none"),
        (swap_norm, (fold(network()), "abn"), "found none"),
        (swap_norm, (ABN(2), "batchnorm"), r"expected norms of tresnet in ABN, found none"),
        *(
            (compose, parts, message)
            for parts, message in (
                ((nn.Conv2d(4, 6, 3, padding=1, bias=False), PADDED), "0.*still read pixels"),
                ((BIASED, PADDED), "would give its bias"),
                ((FIRST, REFLECTED), "part 1 .*'reflect'"),
                ((nn.Conv2d(4, 6, 2, padding="same"), LAST), "part 0 .*expected numbers of zeros"),
                ((BIASED, nn.ReLU()), "part 1 is ReLU"),
                ((nn.Sequential(BIASED, nn.Tanh()), LAST), r"part 0\.1 is Tanh"),
                ((BIASED, nn.Conv2d(5, 2, 1)), "gives 6 channels, but part 1.*takes 5"),
                ((nn.Identity(), nn.Identity()), "at least one convolution"),
                ((), "at least one convolution"),
                ((Residual(nn.Conv2d(4, 4, 1)), LAST), "part 0 is Residual"),
                ((nn.Conv2d(4, 6, 1, dtype=torch.complex64), LAST), "real .* but part 0"),
                (
                    (nn.Sequential(CONV, nn.ReLU()),),
                    "a SubtractedConv inside, got Sequential without one",
                ),
            )
        ),
        *(
            (merge_parallel, (branches,), message)
            for branches, message in (
                ([], "a list of modules with parameters to merge"),
                ([nn.ReLU(), nn.ReLU()], r"modules with parameters to merge, got \[ReLU"),
                ([CONV, 3], "a list of modules with parameters to merge"),
                ([CONV, nn.Conv2d(3, 5, 1)], "out_channels differs: 4"),
                ([LINEAR, CONV], "the class of the branch differs"),
                ([CONV, nn.Conv2d(3, 4, 1).eval()], "training differs: True"),
                ([CONV, nn.Conv2d(3, 4, 1).double()], "weight differs.*float64"),
                (
                    [nn.Sequential(SHARED) for _ in "ab"],
                    "0.weight of branch 0 and 0.weight of branch 1 are",
                ),
                (pair_of(Two(tied=True)), "a.weight of branch 0 and b.weight of branch 0 are"),
                (pair_of(tied_norms()), "0.running_mean of branch 0 and 1.running_mean of branch"),
                (pair_of(nn.GRU(2, 2), nn.GRU(2, 2)), r"_flat_weight\w* differs: .{,60} in branch"),
                (pair_of(Two(act=np.ones(2))), "act differs"),
                (pair_of(Two("ab"), Two("ba")), "the order in the branch differs"),
                (pair_of(Two("ab"), Two("a")), "the order in the branch differs"),
                (pair_of(Two(act=torch.relu), Two(act=torch.tanh)), "act differs"),
                (pair_of(Two(k=torch.ones(1)), Two(k=torch.ones(1))), "k differs"),
                (pair_of(Two(options={"p": 1.0}), Two(options={"p": 3.0})), "options differs"),
                (pair_of(Two(p=1), Two(p=True)), "p differs"),
                (pair_of(hooked(), hooked()), r"branch 0 0: Conv2d has hooks"),
            )
        ),
        *(
            case
            for rewrite in (fold, compose, SubtractedConv.replace_in, swap_to_abn)
            for case in (
                *(
                    (rewrite, (model,), r"expected a model \(torch.nn.Module\), got")
                    for model in (None, "tresnet_m", torch.zeros(1))
                ),
                (rewrite, (torch.compile(network()),), r"change the model first, then torch\.comp"),
            )
        ),
    ],
)
def test_what_cannot_be_rewritten_is_named(rewrite, arguments, message):
    with pytest.raises(InputError, match=message):
        rewrite(*arguments)
