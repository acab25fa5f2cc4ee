"""Check that every command has the defaults of docs/kernels.md, "Defaults"."""

import dataclasses

import pytest

from tresnet import devices
from tresnet.cli.commands import parse
from tresnet.cli.main import main
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.engine.recipes import RECIPES, recipe
from tresnet.measure.cases import BenchCase
from tresnet.memory.plan import MemoryPlan
from tresnet.settings import Compute, InferenceCompute


@pytest.mark.parametrize(
    ("settings", "capability", "amp"),
    [
        ({}, (9, 0), "bf16"),
        ({}, (8, 0), "bf16"),
        ({}, (7, 5), "fp16"),
        ({}, None, "off"),
        ({"dtype": "bf16"}, (9, 0), "off"),
        ({"dtype": "fp16"}, None, "off"),
        ({"amp": "bf16"}, None, "bf16"),
        ({"amp": "fp16"}, (9, 0), "fp16"),
        ({"amp": "off"}, (9, 0), "off"),
    ],
)
def test_auto_follows_from_the_gpu(settings, capability, amp):
    decided = InferenceCompute(**settings).decided(capability)
    assert decided == dataclasses.replace(InferenceCompute(**settings), amp=amp)
    assert decided.decided(capability) == decided


def test_every_command_and_recipe_has_the_same_defaults():
    steps = [recipe(name).step for name in RECIPES]
    predict = parse(["predict", "image", "--weights", "tag"])
    inference = [EvalConfig(data="", weights="").compute, predict.keywords["compute"]]
    inference += [BenchCase().step.compute, MemoryPlan(batch_size=1).step.compute]
    assert all(step.compute == Compute() for step in steps)
    assert all(compute == InferenceCompute() for compute in inference)


@pytest.mark.parametrize(
    "command",
    [
        "train --recipe digits --runs {folder} --data-root {folder}",
        "eval --data digits --data-root {folder} --weights tresnet_t.digits",
        "predict image --weights tresnet_t.digits",
        "bench train tresnet_t",
        "bench infer tresnet_t",
        "bench max-batch tresnet_t --at-most 64",
        "memory measure tresnet_t",
        "memory predict tresnet_t --gpu v100",
        "memory max-batch tresnet_t --gpu v100",
    ],
)
def test_bf16_on_an_old_gpu_is_refused(command, monkeypatch, tmp_path, capsys):
    """Replace the machine's capability by 7.0, which is also that of the v100 of predictions."""
    monkeypatch.setattr(devices, "capability", lambda device: (7, 0))
    monkeypatch.chdir(tmp_path)
    assert main([*command.format(folder=tmp_path).split(), "--amp", "bf16"]) == 2
    message = "a GPU of compute capability 8.0 or more, got one of 7.0: choose --amp fp16"
    assert message in capsys.readouterr().err
