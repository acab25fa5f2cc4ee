"""docs/trainers.md: each section trains like timm's model from the same weights."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from torch.distributed import run

from tests.forks import run_forked
from tests.test_pages import TRAINERS, blocks

START, *SECTIONS = re.split(r"(?m)^## ", TRAINERS.read_text())
CODE = {part.partition("\n")[0]: "\n".join(blocks(part, "python")) for part in SECTIONS}
PACKAGES = {
    "Lightning": "lightning",
    "Hugging Face transformers": "transformers",
    "fastai": "fastai",
    "Activation checkpointing by torch.distributed": "torch",
    "FSDP2": "torch",
    "Quantisation-aware training by torchao": "torchao",
    "torchvision's references": "torchvision",
}
# Summing in another order moves the tenth loss by 2e-5. Fake quantisation turns that into steps of
# 8 bits, which move it by 6e-3.
ROUNDING, QUANTISED = 1e-4, 2e-2
TIMM = """
import timm
ours = build

def build():
    model = timm.create_model("tresnet_m", layers=(1, 1, 2, 1), width_factor=0.25, num_classes=10)
    assert type(model).__module__ == "timm.models.tresnet"
    model.load_state_dict(ours().state_dict())
    return model
"""
# What the script of torchvision's repository calls, in its order.
CALLS = """
from torch.optim.swa_utils import AveragedModel
from torchvision.ops._utils import split_normalization_params

def made():
    model = _api.get_model("tresnet_small", weights=None, num_classes=10)
    norms, others = split_normalization_params(model)
    assert sum(p.ndim == 1 for p in norms) == len(norms) == 2 * sum(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    groups = [{"params": norms, "weight_decay": 0}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return model, optimizer, AveragedModel(model, use_buffers=True)

def epoch(model, optimizer, average):
    model.train()
    for x, y in DataLoader(data, batch_size=16):
        loss = F.cross_entropy(model((x - MEAN[:, None, None]) / STD[:, None, None]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())

losses, parts = [], made()
epoch(*parts)
torch.save([part.state_dict() for part in parts], "checkpoint.pth")
parts = made()
for part, state in zip(parts, torch.load("checkpoint.pth", weights_only=True)):
    part.load_state_dict(state)
epoch(*parts)
parts[2].eval()(images)
"""
NOTE = """
import json, os, pathlib
rank = os.environ.get("RANK", "0")
pathlib.Path(f"losses{rank}.json").write_text(json.dumps(losses))
"""


def losses_of(code: str, folder: Path, processes: int = 1) -> list[list[float]]:
    """The losses of each process that runs the code after the page's beginning."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text("\n".join([*blocks(START, "python"), code, NOTE]))
    if processes > 1:
        words = ["--standalone", f"--nproc-per-node={processes}", "--run-path"]
        words += ["--start-method=fork", str(script)]
        ended = run_forked(run.main, words, folder=folder, OMP_NUM_THREADS="1")
    else:
        ended = run_forked(start, str(script), folder=folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    losses = [json.loads((folder / f"losses{i}.json").read_text()) for i in range(processes)]
    assert {len(part) for part in losses} <= {10, 20}
    return losses


def start(script: str) -> None:
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[list[float]]:
    """The losses of timm's model in the page's plain loop."""
    folder = tmp_path_factory.mktemp("plain") / "timm"
    return losses_of(f"{TIMM}\nlosses = train(build())", folder)


def test_every_section_is_run():
    assert PACKAGES.keys() == CODE.keys()


@pytest.mark.slow
@pytest.mark.parametrize("section", PACKAGES)
def test_a_section_trains_like_timms_model(section: str, plain, tmp_path: Path):
    package = PACKAGES[section]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/trainers.md")
    code = CODE[section]
    tolerance = QUANTISED if package == "torchao" else ROUNDING
    if package == "torchvision":
        code += CALLS
    if section == "FSDP2":
        theirs = code.replace('assert tresnet.create(weights="sharded.pth").num_classes == 10', "")
        expected = losses_of(TIMM + theirs, tmp_path / "timm", processes=2)
        found = losses_of(code, tmp_path / "ours", processes=2)
    elif package == "torchao":  # in one process, as its imports take seconds
        theirs = code.rpartition("\nmove_exported_model_to_eval")[0]
        both = f"{code}\nfirst = losses\n{TIMM}\n{theirs}\nlosses = first + losses"
        (losses,) = losses_of(both, tmp_path / "both")
        found, expected = [losses[:10]], [losses[10:]]
    else:
        expected, found = plain, losses_of(code, tmp_path / "ours")
    for ours, timms in zip(found, expected, strict=True):
        assert ours == pytest.approx(timms, rel=tolerance)
