"""The Python backward walk against the real autograd engine, on fakes of CPU tensors."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from tresnet.checkpoints.named import build_named
from tresnet.memory.device import GENERIC
from tresnet.memory.plan import make_plan
from tresnet.memory.prediction import record
from tresnet.memory.replay import replay


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


FEW = ["tresnet_t", "timm:vit_tiny_patch16_224"]
MANY = [
    "torchvision:mobilenet_v3_small",
    "torchvision:inception_v3",
    "timm:convnext_tiny",
    "timm:swin_tiny_patch4_window7_224",
    "timm:densenet121",
    "timm:hrnet_w18_small",
    "timm:maxvit_tiny_tf_224",
    "timm:xcit_nano_12_p16_224",
    "tresnet_m",
]


def peak_and_end(name: str, *, real_engine: bool, **step: object) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"batch_size": 8, "opt": sgd, **step}
        model: Any = name
        if "inception" in name:
            model = partial(build_named, name, aux_logits=True, init_weights=False)
            settings["input_size"] = 299
        _, module, plan = make_plan(model, **settings)
        trace = record(module, plan, GENERIC, device_type="cpu", real_engine=real_engine)
    replayed = replay(trace)
    return replayed.peak_allocated_bytes, replayed.allocated_bytes[-1]


def assert_walk_equals_engine(name: str, **step: object) -> None:
    engine = peak_and_end(name, real_engine=True, **step)
    walk = peak_and_end(name, real_engine=False, **step)
    assert walk == pytest.approx(engine, rel=1e-3)


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]
)
def test_walk_equals_engine(name):
    assert_walk_equals_engine(name)


@pytest.mark.parametrize(
    "step",
    [
        {"opt": torch.optim.AdamW, "accumulate": 2},
        {"grad_checkpointing": ("layer1", "layer2")},
        {"channels_last": True, "amp": "bf16", "ema_decay": 0.9},
    ],
    ids=["accumulate", "checkpointing", "channels_last bf16"],
)
def test_walk_equals_engine_for_kinds_of_steps(step):
    assert_walk_equals_engine("timm:test_resnet", **step)
