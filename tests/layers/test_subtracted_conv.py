"""SubtractedConv: three modes, one function; what backward keeps."""

import collections
import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.live_storages import live_after
from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.ops.subtraction import MODES
from tresnet.peers import build_named

SIZES = [(7, 9), (8, 5), (1, 1), (2, 11)]
EVEN = {"padding": 1, "bias": False}


class AsWritten(nn.Module):
    """The document's module, its three convolutions shared with `conv`."""

    def __init__(self, conv: SubtractedConv) -> None:
        super().__init__()
        self.p, self.d, self.l = conv.point_wise, conv.depth_wise, conv.low_pass

    def forward(self, x: Tensor) -> Tensor:
        p = self.p(x)
        return torch.cat((self.d(p) - p, self.l(p)), 1)


def outputs_and_gradients(module: nn.Module, x: Tensor, factors: list[Tensor]) -> list[Tensor]:
    y = module(x)
    probe = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * probe).sum(), [x, *factors])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "stride"), list(itertools.product((1, 3, 5), (1, 2, 3))))
def test_every_mode_is_what_was_written(mode: str, kernel: int, stride: int):
    for size in SIZES:
        conv = SubtractedConv(3, 8, kernel, stride, mode=mode, dtype=torch.float64)
        x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
        factors = list(conv.parameters())
        expected = outputs_and_gradients(AsWritten(conv), x, factors)
        found = outputs_and_gradients(conv, x, factors)
        assert len(found) == 5
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["composed", "recompute"])
def test_the_second_derivative(mode: str):
    conv = SubtractedConv(3, 8, 3, 2, mode=mode, dtype=torch.float64)
    x = torch.randn(2, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    inputs = [x, *conv.parameters()]
    results = []
    for module in (conv, AsWritten(conv)):
        first = torch.autograd.grad((module(x) ** 3).sum(), inputs, create_graph=True)
        penalty = torch.stack([part.square().sum() for part in first]).sum()
        results.append(torch.autograd.grad(penalty, inputs))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [["x"], ["point"], ["low"], ["point", "depth", "low"]])
def test_only_what_is_wanted_gets_a_gradient(mode: str, frozen: list[str]):
    conv, x = SubtractedConv(3, 4, 3, mode=mode), torch.randn(1, 3, 5, 5)
    tensors = dict(zip(("x", "point", "depth", "low"), (x, *conv.parameters()), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in frozen)
    conv(x).square().sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is None] == frozen


@pytest.mark.parametrize("mode", MODES)
def test_only_branches_keep_the_middle(mode: str):
    x, conv = torch.randn(2, 6, 8, 8), SubtractedConv(6, 20, 3, mode=mode)
    alive = live_after(lambda: conv(x), [x, *conv.parameters()])
    middle, output = (torch.Size([2, 10, 8, 8]), 5120), (torch.Size([2, 20, 8, 8]), 10240)
    assert (middle in alive, output in alive) == (mode == "branches", True)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_computes_in_16_bits_and_learns_in_32(mode: str):
    conv = SubtractedConv(3, 4, 3, 2, mode=mode)
    x = torch.randn(2, 3, 9, 9)
    exact = conv(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in conv.parameters()} == {torch.float32}
    # two roundings to 8 bits, of values of order one
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=4 * 2**-8)


@pytest.mark.parametrize("mode", MODES)
def test_types_are_those_of_a_plain_convolution(mode: str):
    conv, x = SubtractedConv(3, 4, 3, mode=mode), torch.randn(1, 3, 5, 5)
    for enabled in (True, False):  # in training as in evaluation
        with torch.set_grad_enabled(enabled), pytest.raises(InputError, match="got torch"):
            conv(x.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (3, 1), (3, 2)])
def test_to_conv_is_one_plain_convolution(kernel: int, stride: int):
    conv = SubtractedConv(5, 6, kernel, stride).requires_grad_(False).eval()
    plain = conv.to_conv()
    x = torch.randn(2, 5, 9, 7)
    assert type(plain) is nn.Conv2d
    assert not plain.weight.requires_grad
    assert not plain.training
    assert plain.dilation == ((1, 1) if kernel == 1 else (stride, stride))
    torch.testing.assert_close(plain(x), conv(x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiles_as_one_graph(mode: str):
    conv = SubtractedConv(3, 4, 3, mode=mode)
    x = torch.randn(1, 3, 6, 6)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), conv(x))


@pytest.mark.parametrize("source", ["torchvision", "timm"])
def test_resnet50_gets_the_documents_16_million(source: str):
    model, sizes = build_named(f"{source}:resnet50", device="meta"), []
    sizes.append(sum(p.numel() for p in model.parameters()))
    names = SubtractedConv.replace_in(model)
    sizes.append(sum(p.numel() for p in model.parameters()))
    assert [f"{size / 1e6:.2f}" for size in sizes] == ["25.56", "15.87"]
    kinds = collections.Counter(name.rpartition(".")[2] for name in names)
    assert kinds == {"conv1": 16, "conv2": 16}
    assert all(isinstance(model.get_submodule(name), SubtractedConv) for name in names)


def small() -> nn.Sequential:
    """A model with two convolutions that a SubtractedConv can replace, and one it cannot."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding="same", bias=False), nn.Conv2d(8, 4, 1)),
    )


@pytest.mark.parametrize("mode", MODES)
def test_shapes_settings_and_unsuitable_ones_stay(mode: str):
    model, x = small().double().eval(), torch.randn(2, 3, 9, 11, dtype=torch.float64)
    model[0].requires_grad_(False)
    shape = model(x).shape
    assert SubtractedConv.replace_in(model, mode) == ["0", "3.0"]
    assert (model[0].mode, model[0].training, model[0].stride) == (mode, False, 2)
    assert not model[0].point_wise.weight.requires_grad
    assert model[3][0].low_pass.weight.requires_grad
    assert type(model[3][1]) is nn.Conv2d
    assert model(x).shape == shape
    model[3].append(nn.Conv2d(4, 4, 3, padding=1, bias=False, dtype=torch.float64))
    assert SubtractedConv.replace_in(model) == ["3.2"], "not what is inside the others"


def with_hook(conv: nn.Conv2d) -> nn.Conv2d:
    conv.register_forward_hook(lambda *_: None)
    return conv


@pytest.mark.parametrize(
    "conv",
    [
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 9, 3, **EVEN),
        nn.Conv2d(8, 8, 3, groups=2, **EVEN),
        nn.Conv2d(8, 8, 3, dilation=2, **EVEN),
        nn.Conv2d(8, 8, 3, stride=(1, 2), **EVEN),
        nn.Conv2d(8, 8, (3, 1), **EVEN),
        nn.Conv2d(8, 8, (3, 1), padding=(1, 0), bias=False),
        nn.Conv2d(8, 8, 2, **EVEN),
        nn.Conv2d(8, 8, 3, padding_mode="reflect", **EVEN),
        nn.Conv2d(3, 9 * 8, 1, bias=False),  # 3 x 36 + 36 + 36 x 36 parameters for 3 x 72
        nn.Conv2d(3, 4, 1, bias=False),  # 3 x 2 + 2 + 2 x 2, which are as many as 3 x 4
        nn.LazyConv2d(8, 1, bias=False),
        type("Other", (nn.Conv2d,), {})(8, 8, 3, **EVEN),
        with_hook(nn.Conv2d(8, 8, 3, **EVEN)),
    ],
)
def test_what_nothing_stands_in_for_stays(conv: nn.Module):
    with pytest.raises(InputError, match="inside Sequential that a SubtractedConv can replace"):
        SubtractedConv.replace_in(nn.Sequential(conv))


def test_what_does_not_matter_to_a_1x1_is_no_obstacle():
    conv = nn.Conv2d(64, 16, 1, dilation=2, padding_mode="reflect", bias=False)
    assert SubtractedConv.replace_in(nn.Sequential(conv)) == ["0"]
    assert SubtractedConv(1, 2, 1)(torch.ones(1, 1, 2, 2)).shape == (1, 2, 2, 2), "the smallest"
