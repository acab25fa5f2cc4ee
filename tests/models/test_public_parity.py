"""Files in the public TResNet format against the network that wrote them.

That network (`public_network`) uses the real inplace-abn package where it is installed, and the
package's formula in plain operations everywhere. A third of its weights are negative, some are
zero. Two comparisons: in float64, where rounding hides nothing; and in float32 with a deep
network, where ours may be about as far from the float64 truth as the package itself is.
"""

import pytest
import torch

from tests.models.public_network import PublicTResNet, StandInABN, randomise
from tests.toys import NORMS
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.remap import public_name
from tresnet.models.zoo import build

SMALL = ((1, 2, 1, 1), 16)
DEEP = ((3, 4, 6, 3), 32)  # half as wide as tresnet_m
CLASSES = 10
# The package keeps its slope in float32: a relative error of 6e-8 times the slope of 1e-2, and
# the float64 differences of a few layers on top.
EXACT = 1e-7
# Errors of the same computation in float32 differ by chance from one order of summation to another.
CHANCE, FLOOR = 3, 1e-6


def abn_class(kind):
    if kind == "formula":
        return StandInABN
    return pytest.importorskip("inplace_abn").InPlaceABN


def make_public(kind, shape, v2, filters=True):
    """Random weights; running statistics of a batch, so that eval mode keeps its scale."""
    generator = torch.Generator().manual_seed(0)
    layers, planes = shape
    model = PublicTResNet(layers, planes, CLASSES, v2, abn_class(kind), filters)
    randomise(model, generator)
    norms = [m for m in model.modules() if hasattr(m, "running_var")]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 64, 96, generator=generator))
    for norm in norms:
        norm.momentum = 0.1
    weights = torch.cat([norm.weight.detach() for norm in norms])
    assert (weights < 0).float().mean() > 0.3
    assert (weights == 0).float().mean() > 0.1
    return model


def run(model, training, dtype, names=str):
    """Logits, gradients and running statistics of one forward and backward, by our names."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 64, 96, generator=generator).to(dtype)
    direction = torch.randn(2, CLASSES, generator=generator).to(dtype)
    model.train(training)
    model.zero_grad()
    logits = model(x)
    (logits * direction).sum().backward()
    return {
        "logits": {"logits": logits.detach()},
        "grads": {names(k): p.grad.clone() for k, p in model.named_parameters()},
        "statistics": {names(k): b.clone() for k, b in model.named_buffers() if "running" in k},
    }


def run_public(model, training, dtype):
    """d gamma is sign(w) d w, where the package takes the sign of zero as +1."""
    weights = {public_name(k): p.detach().clone() for k, p in model.named_parameters()}
    made = run(model, training, dtype, public_name)
    for name, grad in made["grads"].items():
        if name.endswith(".bn.weight"):
            grad[weights[name] < 0] *= -1
    return made


def load(path, shape, v2, norm, dtype):
    layers, planes = shape
    options = {"layers": layers, "width_factor": planes / 64, "num_classes": CLASSES}
    model = build("tresnet_v2_l" if v2 else "tresnet_m", norm=norm, dtype=dtype, **options)
    load_checkpoint(model, path)
    return model


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def largest_distance(found, expected):
    """The largest distance of a tensor, and which one that is."""
    made = {}
    for part, tensors in expected.items():
        assert found[part].keys() == tensors.keys()
        made |= {(part, k): distance(found[part][k], t) for k, t in tensors.items()}
    worst = max(made, key=made.get)
    return made[worst], worst


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("kind", ["formula", "package"])
def test_same_function_in_float64(tmp_path, kind, v2, norm, training):
    public = make_public(kind, SMALL, v2, filters=training).double()
    state = public.state_dict()
    torch.save({"model": state} if v2 else state, tmp_path / "a.pth")
    ours = load(tmp_path / "a.pth", SMALL, v2, norm, torch.float64)
    slopes = {m.slope for m in ours.modules() if getattr(m, "slope", None) is not None}
    assert slopes == ({1e-6} if v2 else {1e-2, 1e-3})
    expected = run_public(public, training, torch.float64)
    error, where = largest_distance(run(ours, training, torch.float64), expected)
    assert expected["logits"]["logits"].std() > 0.1
    assert error < EXACT, where


@pytest.fixture(scope="module")
def deep(tmp_path_factory, request):
    """A file of a deep network, and what that network gives for it, by dtype and mode."""
    public = make_public(request.param, DEEP, v2=False)
    state = {k: v.clone() for k, v in public.state_dict().items()}
    paths, runs = {}, {}
    for dtype in (torch.float64, torch.float32):
        public.load_state_dict(state)
        public.to(dtype)
        paths[dtype] = tmp_path_factory.mktemp("deep") / f"{dtype}.pth"
        torch.save({"model": public.state_dict()}, paths[dtype])
        for training in (False, True):
            public.load_state_dict(state)
            runs[dtype, training] = run_public(public, training, dtype)
    return paths, runs


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("deep", "norm"),
    [
        *(("formula", norm) for norm in ("abn", "batchnorm")),
        *(("package", norm) for norm in ("abn", "batchnorm", "inplace_abn")),
    ],
    indirect=["deep"],
)
def test_a_deep_network_in_float32(deep, norm, training):
    """The error is that of the public network's own float32 on this machine, within chance."""
    paths, runs = deep
    ours = load(paths[torch.float32], DEEP, False, norm, torch.float32)
    truth, eager = runs[torch.float64, training], runs[torch.float32, training]
    found = run(ours, training, torch.float32)
    lost = {part: distance(flat(eager, part), flat(truth, part)) for part in truth}
    assert lost["logits"] < 1e-3 / CHANCE
    assert lost["statistics"] < 1e-3 / CHANCE
    assert lost["grads"] < 1 / CHANCE  # a gradient of zeros would be 1 away
    lost["grads"] = max(lost["grads"], lost["logits"] ** 0.5)
    for part in truth:
        error = distance(flat(found, part), flat(truth, part))
        assert error < CHANCE * lost[part] + FLOOR, part


def flat(made, part):
    return torch.cat([made[part][k].flatten().double() for k in sorted(made[part])])
