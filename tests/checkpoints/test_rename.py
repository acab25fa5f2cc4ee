"""Files in the public TResNet format against timm's network, and files of no TResNet.

A third of the norms' weights are negative, some are zero. Outputs, gradients and statistics are
compared in float64, where rounding hides nothing.
"""

from typing import Any

import pytest
import torch

from tests.toys import NORMS, small, small_public, step, use_statistics
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.checkpoints.rename import rename
from tresnet.checkpoints.save import save_checkpoint
from tresnet.errors import CheckpointError
from tresnet.layers.norm import NormAct
from tresnet.models.zoo import build
from tresnet.settings.model import ModelConfig

# The inplace-abn package keeps its slope in float32: a relative error of 6e-8 times the slope of
# 1e-2, and the float64 differences of a few layers on top.
EXACT = 1e-7


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_same_function_in_float64(tmp_path, v2, norm, training):
    public = small_public(v2, filters=training, dtype=torch.float64)
    use_statistics(public, torch.rand(4, 3, 64, 96, dtype=torch.float64))
    weights = torch.cat(list(public.w.values()))
    assert (weights < 0).float().mean() > 0.3
    assert (weights == 0).float().mean() > 0.1
    state = public.state_dict()
    torch.save({"model": state} if v2 else state, tmp_path / "a.pth")
    assert open_checkpoint(tmp_path / "a.pth").format == "public"
    ours = small("tresnet_v2_l" if v2 else "tresnet_m", dtype=torch.float64, norm=norm)
    load_checkpoint(ours, tmp_path / "a.pth")
    slopes = {m.slope for m in ours.modules() if getattr(m, "slope", None) is not None}
    assert slopes == {1e-2, 1e-3}
    x = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    expected, found = step(public.train(training), x), step(ours.train(training), x)
    assert expected["logits"].std() > 0.1
    values = {k: expected[k] for k in found if expected[k].is_floating_point()}
    errors = {k: (found[k] - value).norm() / value.norm() for k, value in values.items()}
    assert max(errors.values()) < EXACT, max(errors, key=errors.get)


def test_gammas_of_half_precision_keep_the_eps(tmp_path):
    w = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float16)
    tensors = {"body.conv1.0.weight": torch.ones(1), "body.conv1.1.weight": w}
    renamed, _ = rename(tmp_path, tensors)
    expected = torch.tensor([1.00001, 0.50001, 0.00001])
    assert torch.equal(renamed["body.conv1.bn.weight"], expected)


@pytest.mark.parametrize("head", ["linear", "group_attention"])
def test_defaults_of_new_models_do_not_change_what_files_mean(head, tmp_path, monkeypatch):
    """A file without metadata has its format's slopes, whatever a new model's defaults are."""
    files = {}
    for name, v2 in (("m", False), ("v2_l", True)):
        files[tmp_path / f"{name}.pth"] = (1e-2, 1e-3)
        torch.save(small_public(v2=v2).state_dict(), tmp_path / f"{name}.pth")
    files[tmp_path / "timm.pth"] = (1e-2, 1e-3)
    model = small(head=head)
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    defaults: Any = ModelConfig.__init__.__kwdefaults__
    for name, value in {"stem_slope": 0.25, "block_slope": 0.125}.items():
        monkeypatch.setitem(defaults, name, value)
    assert small().config.stem_slope == 0.25
    with pytest.raises(CheckpointError, match=r"stem_slope=0.25 \(timm's has 0.01\)"):
        save_checkpoint(small(), tmp_path / "new.pth", format="timm")
    for path, slopes in files.items():
        created = create(weights=path)
        config = created.config
        loaded = build(config.variant, **{**config.options, "stem_slope": 0.5})
        load_checkpoint(loaded, path)
        for found in (created, loaded):
            assert (found.config.stem_slope, found.config.block_slope) == slopes
            activations = {m.slope for m in found.modules() if isinstance(m, NormAct)}
            assert activations == {*slopes, None}
