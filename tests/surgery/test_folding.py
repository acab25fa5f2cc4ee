"""A folded model computes what the model did, is a module like others, and cannot be trained."""

import copy
import pickle

import pytest
import torch
from timm.utils.model import freeze
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

import tresnet
from tests.toys import NEEDS_PACKAGE, NORMS, features, images, network, same, snapshot
from tresnet.errors import InputError
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.norm import ABN, NormAct
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.models.tresnet import feature_extractor
from tresnet.surgery import fold, swap_norm

# The package takes eps as float32, which moves gamma by up to 2.5e-13 of about 1.
EXACT = {"abn": 1e-10, "batchnorm": 1e-10, "inplace_abn": 1e-9}


@pytest.mark.parametrize(
    ("norm", "name", "options"),
    [
        ("abn", "tresnet_t", {}),
        ("batchnorm", "tresnet_v2_l", {}),
        pytest.param("inplace_abn", "tresnet_t", {"merge_stem": True}, marks=NEEDS_PACKAGE),
        ("abn", "tresnet_v2_l", {"merge_stem": True}),
    ],
)
def test_the_outputs_are_the_same(norm, name, options):
    model = network(name, norm, block_size=4 if name == "tresnet_v2_l" else 2).double()
    model.body.layer1[0].conv1.bn.slope = 0.25  # its own counts
    x = images(torch.double, height=40, width=44)
    folded = fold(model, **options)
    close = {"rtol": EXACT[norm], "atol": EXACT[norm]}
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), **close)
        torch.testing.assert_close(features(folded, x), features(model, x), **close)
        final = folded.forward_features(x)
        torch.testing.assert_close(folded.forward_head(final), model(x), **close)
    assert final.shape[1] == folded.num_features == model.num_features


@pytest.mark.parametrize("norm", ["abn", "batchnorm"])
def test_norms_that_timm_has_frozen_are_folded(norm):
    model, x = network(norm=norm).double(), images(torch.double)
    expected = model(x)
    freeze(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for parts in (model, nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8)).double().eval()):
        close = {"rtol": EXACT[norm], "atol": EXACT[norm]}
        torch.testing.assert_close(fold(parts)(x), parts(x), **close)
    torch.testing.assert_close(fold(model)(x), expected, **close)


@pytest.mark.parametrize("norm", NORMS)
def test_fp32_rounds_no_worse_than_the_model_itself(norm):
    model, x = network(norm=norm), images()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        own, folded = model(x) - exact, fold(model)(x) - exact
    assert folded.abs().max() <= 3 * own.abs().max() + 1e-6


def test_the_model_itself_stays_unless_inplace():
    model, x = network(), images()
    before = snapshot(model)
    folded = fold(model)
    assert same(model.state_dict(), before)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(isinstance(m, NormAct) for m in folded.modules())
    assert not folded.training
    assert not any(p.requires_grad for p in folded.parameters())
    assert (folded.config, folded.pretrained_cfg) == (model.config, model.pretrained_cfg)
    assert fold(model, inplace=True) is model
    assert any(isinstance(m, FoldedConv) for m in model.modules())
    torch.testing.assert_close(model(x), folded(x), rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [2, 4])
def test_the_merged_stem_is_one_strided_convolution(block_size):
    model = network(block_size=block_size).double()
    merged = fold(model, merge_stem=True)
    conv = merged.body.conv1.conv
    assert not any(isinstance(m, SpaceToDepth) for m in merged.modules())
    assert conv.kernel_size == (3 * block_size,) * 2
    assert (conv.stride, conv.padding) == ((block_size,) * 2, (block_size,) * 2)
    x = images(torch.double, height=5 * block_size, width=7 * block_size)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match=f"divisible by {block_size}"):
        merged(images(torch.double, height=5 * block_size + 1))


def test_it_traces_compiles_exports_copies_and_pickles():
    model, x = network(layers=(1, 1, 1, 1)).double(), images(torch.double).requires_grad_()
    folded = fold(model)
    expected = model(x)
    (exact,) = torch.autograd.grad(expected.square().sum(), x)
    for other in (
        folded,
        torch.jit.trace(folded, x),
        torch.compile(folded, backend="aot_eager", fullgraph=True),
        torch.export.export(folded, (x.detach(),)).module(),
        copy.deepcopy(folded),
        pickle.loads(pickle.dumps(folded)),
        copy.deepcopy(folded).to(memory_format=torch.channels_last),
    ):
        y = other(x)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
        (of_x,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(of_x, exact, rtol=1e-9, atol=1e-10)


def test_a_feature_extractor_folds():
    extractor = feature_extractor(network(), (0, 2)).double().eval()
    x = images(torch.double)
    folded = fold(extractor)
    torch.testing.assert_close(folded(x), extractor(x), rtol=1e-10, atol=1e-10)
    assert [y.shape[1] for y in folded(x)] == extractor.feature_info.channels()


@pytest.mark.parametrize("rewrite", [fold, lambda m: swap_norm(m, "batchnorm")])
def test_a_head_with_norms_of_its_own(rewrite):
    model = network(head="group_attention", num_classes=5, head_groups=2, head_channels=8).double()
    x = images(torch.double)
    expected = model(x)
    rewritten = rewrite(model)
    torch.testing.assert_close(rewritten(x), expected, rtol=1e-9, atol=1e-10)
    left = {type(m) for m in rewritten.modules() if isinstance(m, NormAct)}
    assert left == {fold: set()}.get(rewrite, {NormAct})
    if rewrite is fold:
        assert type(rewritten.head.attention.conv2.conv) is nn.Conv2d
        rewritten.set_slopes(0.3, 0.2)
        model.set_slopes(0.3, 0.2)
        torch.testing.assert_close(rewritten(x), model(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("affine", [True, False])
def test_other_modules_fold_their_sequential_pairs(affine):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, groups=3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(6, affine=affine),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.BatchNorm2d(4),
    ).double()
    x = images(torch.double)
    for _ in range(3):
        model(x)
    folded = fold(model.eval())
    assert [type(child) for child in folded[::4]] == [nn.Conv2d, nn.Identity]
    assert [repr(child) for child in folded[:4:3]] == [
        "Conv2d(3, 6, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=3, "
        "padding_mode=reflect)",
        "Conv2d(6, 4, kernel_size=(1, 1), stride=(1, 1))",
    ]
    torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_shared_block_stays_shared():
    block = network().body.layer1[0].conv2
    folded = fold(nn.Sequential(block, nn.Sequential(block)).eval())
    assert isinstance(folded[0], FoldedConv)
    assert folded[0] is folded[1][0]


def test_checkpoints_belong_to_the_model_before_folding(tmp_path):
    model = network()
    path = tmp_path / "model.safetensors"
    tresnet.save_checkpoint(model, path)
    folded = fold(model)
    with pytest.raises(InputError, match=r"a model folded .*load and save the model"):
        tresnet.save_checkpoint(folded, tmp_path / "folded.safetensors")
    with pytest.raises(InputError, match="a model folded"):
        tresnet.load_checkpoint(folded, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def overflowing(model):
    bn = model.half().body.conv1.bn
    bn.weight.data.fill_(60000)
    bn.running_var.fill_(1e-7)


def of_another_class(model):
    model.body.conv1.bn.__class__ = type("Other", (ABN,), {"forward": lambda self, x: x})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.train(), "eval mode, but body.conv1.bn is in training"),
        (overflowing, r"beyond the range of torch\.float16: fold .* float32"),
        (
            lambda model: model.set_submodule("body.conv1.bn", nn.InstanceNorm2d(16).eval()),
            "body.conv1.bn is InstanceNorm2d",
        ),
        (of_another_class, r"body.conv1.bn is Other"),
        (lambda model: fold(model, inplace=True), "found none: it is folded already"),
        (SubtractedConv.replace_in, r"is SubtractedConv: call tresnet\.surgery\.compose first"),
    ],
)
def test_what_cannot_be_folded_is_named(change, message):
    model = network(width_factor=0.25)
    change(model)
    before = snapshot(model)
    with pytest.raises(InputError, match=message):
        fold(model, inplace=True)
    assert same(model.state_dict(), before)
    if change is of_another_class:
        with pytest.raises(InputError, match=message):
            swap_norm(model, "batchnorm")


def test_the_folded_model_refuses_training():
    folded, x = fold(network()), images()
    before = folded(x)
    for part in (folded, next(m for m in folded.modules() if isinstance(m, FoldedConv))):
        with pytest.raises(InputError, match=r"for inference: train the model that was given"):
            part.train()
    assert torch.equal(folded(x), before)
    folded.eval()


@pytest.mark.parametrize("hooked", [True, False])
def test_the_activation_is_in_place_unless_a_hook_may_keep_its_input(hooked):
    made = []
    conv = nn.Conv2d(3, 4, 1)
    layer = FoldedConv(conv, 0.5, nn.Identity())
    conv.forward = lambda x: made.append(nn.Conv2d.forward(conv, x)) or made[0]
    if hooked:
        conv.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        y = layer(torch.randn(2, 3, 4, 4))
    assert (y is made[0]) != hooked
    assert (made[0].min() < y.min()) == hooked
