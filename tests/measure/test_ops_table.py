"""The table's references are the model's layers, its places the model's, its bytes the stated ones."""

import pytest
import torch
from torch import nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.norm import BatchNormAct, NormAct
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.measure.macs import without_computing
from tresnet.measure.ops_table import OPS, SLOPE, Place
from tresnet.models.zoo import build
from tresnet.ops.tiles import interpreted

CPU = torch.device("cpu")


def inputs_of(name, shape=(3, 8, 6, 6), se=0, dtype=torch.float32):
    torch.manual_seed(0)
    return OPS[name].make(shape, Place("test", shape[1], 1, se), dtype, CPU)


def layers_of(name, inputs):
    """The operation by this package's own modules, with the parameters of `inputs`."""
    _, channels, _, _ = inputs.maps[0].shape
    if name == "stem":
        stem = SpaceToDepth(4)
        return lambda images: stem(images / 255)
    blur = BlurPool2d()
    if name == "blur":
        return blur
    norm = BatchNormAct(channels, None if name == "abn_join" else SLOPE)
    names = ("weight", "bias", "running_mean", "running_var")
    norm.load_state_dict(norm.state_dict() | dict(zip(names, inputs.vectors[:4], strict=True)))
    gate = nn.Identity()
    if len(inputs.vectors) > 5:
        gate = SqueezeExcite(channels, inputs.vectors[4].shape[0])
        shapes = [value.shape for value in gate.state_dict().values()]
        values = [v.reshape(s) for v, s in zip(inputs.vectors[4:], shapes, strict=True)]
        gate.load_state_dict(dict(zip(gate.state_dict(), values, strict=True)))
    if name == "abn_blur":
        return lambda x: blur(norm(x))
    if name == "abn_join":
        return lambda x, shortcut: torch.relu(gate(norm(x)) + shortcut)
    return lambda x: gate(norm(x))


@pytest.mark.parametrize(
    ("name", "se"),
    [
        ("abn", 0),
        ("abn_blur", 0),
        ("abn_se", 5),
        ("abn_join", 0),
        ("abn_join", 5),
        ("blur", 0),
        ("stem", 0),
    ],
)
def test_references_are_the_layers(name, se):
    shape = (3, 3, 8, 8) if name == "stem" else (3, 8, 6, 6)
    inputs = inputs_of(name, shape, se)
    expected = layers_of(name, inputs)(*inputs.maps)
    y = OPS[name].reference(*inputs.maps, *inputs.vectors)
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "impl"), [(name, impl) for name in OPS for impl in OPS[name].impls]
)
def test_ours_computes_the_same(name, impl):
    shape = (2, 3, 8, 8) if name == "stem" else (3, 8, 6, 6)
    op, (inputs, others) = OPS[name], (inputs_of(name, shape, se=4) for _ in range(2))
    if impl == "triton" and not interpreted():
        pytest.skip("without Triton's interpreter the kernels need a GPU")
    wanted = inputs.differentiated()
    expected = op.reference(*inputs.maps, *inputs.vectors)
    found = op.ours(impl)(*others.maps, *others.vectors)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(others.vectors, inputs.vectors, strict=True):
        torch.testing.assert_close(ours, theirs)  # running statistics
    assert len(wanted) == {"stem": 0, "blur": 1, "abn_se": 7, "abn_join": 8}.get(name, 3)
    if not wanted:
        return
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, others.differentiated(), grad)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, wanted, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_places_are_those_of_the_model():
    norms, gates, blurs = set(), set(), set()

    def note(module, arguments, output):
        shape = (arguments[0].shape[1], 224 // arguments[0].shape[2])
        if isinstance(module, SqueezeExcite):
            gates.add((*shape, module.fc1.out_channels))
        elif isinstance(module, BlurPool2d):
            blurs.add(shape)
        else:
            norms.add((*shape, module.slope))

    with without_computing():
        model = build("tresnet_m")
        for module in model.modules():
            if isinstance(module, NormAct | SqueezeExcite | BlurPool2d):
                module.register_forward_hook(note)
        model(torch.empty(2, 3, 224, 224))
    for name, op in OPS.items():
        for place in op.places:
            shape = (place.channels, place.reduction)
            if name.startswith("abn"):
                assert (*shape, None if name == "abn_join" else SLOPE) in norms, (name, place)
            if place.se:
                assert (*shape, place.se) in gates, (name, place)
            if "blur" in name:
                assert shape in blurs, (name, place)
    # no place of the model is left out
    halved = {(p.channels, p.reduction) for p in OPS["blur"].places}
    assert halved == blurs
    joined = {(p.channels, p.reduction) for p in OPS["abn_join"].places}
    assert joined == {(c, r) for c, r, slope in norms if slope is None}


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("abn", 3, 5),
        ("abn_blur", 2.25, 3.5),
        ("abn_se", 4, 5),
        ("abn_join", 4, 7),
        ("blur", 1.25, 1.25),
    ],
)
def test_ideal_bytes_in_sizes_of_the_input(name, forward, backward):
    inputs = inputs_of(name, (2, 8, 4, 4), se=3 if name == "abn_se" else 0, dtype=torch.bfloat16)
    y = OPS[name].reference(*inputs.maps, *inputs.vectors)
    size = inputs.maps[0].numel() * 2
    ideal = OPS[name].ideal_bytes(size, y.numel() * y.element_size())
    assert ideal == (forward * size, backward * size)


def test_the_stem_has_no_gradient():
    inputs = inputs_of("stem", (2, 3, 8, 8), dtype=torch.bfloat16)
    y = OPS["stem"].reference(*inputs.maps, *inputs.vectors)
    assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, (2, 48, 2, 2))
    assert OPS["stem"].ideal_bytes(2 * 3 * 64, 2 * y.numel()) == (384 + 768, 0)
    assert inputs.differentiated() == []
