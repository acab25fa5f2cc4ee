"""Files in the public TResNet format against the network that wrote them.

That network (`public_network`) uses the real inplace-abn package where it is installed, and the
package's formula in plain operations everywhere. A third of its weights are negative, some are
zero. They are compared in float64, where rounding hides nothing.
"""

import pytest
import torch

from tests.models.public_network import PublicTResNet, StandInABN, randomise
from tests.toys import CLASSES, LAYERS, NORMS, PLANES
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.remap import public_name
from tresnet.models.zoo import build

# The package keeps its slope in float32: a relative error of 6e-8 times the slope of 1e-2, and
# the float64 differences of a few layers on top.
EXACT = 1e-7


def abn_class(kind):
    if kind == "formula":
        return StandInABN
    return pytest.importorskip("inplace_abn").InPlaceABN


def make_public(kind, v2, filters):
    """Random weights; running statistics of a batch, so that eval mode keeps its scale."""
    generator = torch.Generator().manual_seed(0)
    model = PublicTResNet(LAYERS, PLANES, CLASSES, v2, abn_class(kind), filters)
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


def run(model, training, names=str):
    """Logits, gradients and running statistics of one forward and backward, by our names."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 64, 96, generator=generator).double()
    direction = torch.randn(2, CLASSES, generator=generator).double()
    model.train(training)
    model.zero_grad()
    logits = model(x)
    (logits * direction).sum().backward()
    gradients = {names(k): p.grad.clone() for k, p in model.named_parameters()}
    statistics = {names(k): b.clone() for k, b in model.named_buffers() if "running" in k}
    return {"logits": logits.detach(), **gradients, **statistics}


def run_public(model, training):
    """d gamma is sign(w) d w, where the package takes the sign of zero as +1."""
    weights = {public_name(k): p.detach().clone() for k, p in model.named_parameters()}
    made = run(model, training, public_name)
    for name, tensor in made.items():
        if name.endswith(".bn.weight"):
            tensor[weights[name] < 0] *= -1
    return made


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("kind", ["formula", "package"])
def test_same_function_in_float64(tmp_path, kind, v2, norm, training):
    public = make_public(kind, v2, filters=training).double()
    state = public.state_dict()
    torch.save({"model": state} if v2 else state, tmp_path / "a.pth")
    options = {"layers": LAYERS, "width_factor": PLANES / 64, "num_classes": CLASSES, "norm": norm}
    ours = build("tresnet_v2_l" if v2 else "tresnet_m", dtype=torch.float64, **options)
    load_checkpoint(ours, tmp_path / "a.pth")
    slopes = {m.slope for m in ours.modules() if getattr(m, "slope", None) is not None}
    assert slopes == ({1e-6} if v2 else {1e-2, 1e-3})
    expected, found = run_public(public, training), run(ours, training)
    assert expected["logits"].std() > 0.1
    assert found.keys() == expected.keys()
    errors = {k: (found[k] - value).norm() / value.norm() for k, value in expected.items()}
    assert max(errors.values()) < EXACT, max(errors, key=errors.get)
