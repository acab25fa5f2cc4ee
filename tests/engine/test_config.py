import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.recipes import RECIPES
from tresnet.engine.train import train
from tresnet.engine.validate import validate
from tresnet.errors import ConfigError

GOOD = configs.replace(TrainConfig(), model="tresnet_t", data="somewhere")


def test_every_field_has_an_option_of_its_own():
    names = Counter(
        field.name
        for group in dataclasses.fields(GOOD)
        if dataclasses.is_dataclass(getattr(GOOD, group.name))
        for field in dataclasses.fields(getattr(GOOD, group.name))
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert set(configs.flatten(GOOD)) == {"recipe", *names}


@pytest.mark.parametrize("name", RECIPES)
def test_json_gives_the_same_configuration_back(name):
    config = configs.replace(RECIPES[name](), layers=(1, 2, 2, 1), clip_grad=1.0)
    assert configs.from_json(configs.to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": {"epoch": 3}}, "unknown field 'schedule.epoch': did you mean 'schedule.ep"),
        ({"wheels": 3}, "unknown field 'wheels': expected one of augment, compute, data"),
        ({"schedule": {"epochs": "3"}}, "schedule.epochs: expected a whole number, got '3'"),
        ({"schedule": {"epochs": True}}, "schedule.epochs: expected a whole number, got True"),
        ({"optim": {"lr": None}}, "optim.lr: expected a number, got None"),
        ({"compute": {"amp": "fp8"}}, "compute.amp: expected 'off', 'bf16' or 'fp16', got 'fp8'"),
        ({"data": {"crop_mode": "left"}}, "expected 'center' or 'squash', got 'left'"),
        (
            {"augment": {"crop_scale": [0.1]}},
            "augment.crop_scale: expected as many values as it has",
        ),
        ({"optim": {"lr": float("nan")}}, "optim.lr: expected a finite number, got nan"),
        ({"data": {"batch_size": "some"}}, "expected a whole number or 'auto', got 'some'"),
        ({"optim": 3}, "expected optim of run.json to be an object with fields, got 3"),
        ([], "expected run.json to be an object with fields, got []"),
    ],
)
def test_json_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ConfigError) as error:
        configs.from_json(json.dumps(change), "run.json")
    assert message in str(error.value)
    assert "run.json" in str(error.value)


def test_broken_json_and_absent_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
        configs.from_json("{", "run.json")
    with pytest.raises(ConfigError, match=r"no readable config\.json of a run at"):
        configs.load(tmp_path / "config.json")


def test_integers_are_read_as_floats_where_a_float_is_meant():
    config = configs.from_json('{"optim": {"lr": 1}}')
    assert isinstance(config.optim.lr, float)


def test_replace_suggests_the_nearest_option():
    with pytest.raises(ConfigError, match="unknown option 'epoch': did you mean 'epochs'"):
        configs.replace(GOOD, epoch=3)


def test_resuming_with_other_options_lists_each_with_both_values():
    other = configs.replace(GOOD, epochs=7, lr=0.5, workers=1, log_interval=3, data="moved")
    with pytest.raises(ConfigError) as error:
        configs.check_resumable(GOOD, other, Path("runs/a/best.safetensors"))
    message = str(error.value)
    assert "--epochs: the run has 300, now 7" in message
    assert "--lr: the run has 0.1, now 0.5" in message
    assert "(--weights runs/a/best.safetensors starts it from this one's weights)" in message
    assert "workers" not in message
    assert "log-interval" not in message


def test_resuming_may_change_what_does_not_alter_the_result():
    other = {
        "workers": 1,
        "log_interval": 3,
        "skip_bad_steps": 2,
        "progress": False,
        "tensorboard": False,
        "track": "wandb",
        "eval_batch_size": 3,
        "gpu_memory": "24GiB",
        "checkpoint_interval_s": 1.0,
        "eval_interval": 2,
        "data": "moved",
        "data_root": "elsewhere",
    }
    assert set(other) == configs.FREE_AT_RESUME
    configs.check_resumable(GOOD, configs.replace(GOOD, **other), Path())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "--batch-size: expected at least 1 or 'auto', got 0"),
        ({"epochs": -1}, "--epochs: expected at least 1, got -1"),
        ({"workers": -1}, "--workers: expected at least 0, got -1"),
        ({"lr": 0.0}, "--lr: expected more than 0, got 0.0"),
        ({"lr": float("nan")}, "--lr: expected a finite number, got nan"),
        ({"lr": float("inf")}, "--lr: expected a finite number, got inf"),
        ({"seed": 2**63}, "--seed: expected less than 9223372036854775808, got"),
        ({"clip_grad": -1.0}, "--clip-grad: expected more than 0, got -1.0"),
        ({"ema_decay": 1.0}, "--ema-decay: expected less than 1, got 1.0"),
        ({"warmup_fraction": 1.5}, "--warmup-fraction: expected at most 1, got 1.5"),
        ({"end_factor": 0.0}, "--end-factor: expected more than 0, got 0.0"),
        ({"crop_pct": 0.0}, "--crop-pct: expected more than 0, got 0.0"),
        ({"hflip": 2.0}, "--hflip: expected at most 1, got 2.0"),
        ({"epochs": "many"}, "--epochs: expected a whole number, got 'many'"),
        ({"amp": "fp8"}, "--amp: expected 'off', 'bf16' or 'fp16', got 'fp8'"),
        ({"data": None}, "--data: say what to train on"),
        ({"model": None}, "--model: say which model to train"),
        ({"new_head": True}, "--new-head replaces the head of --weights, but no weights"),
        ({"recipe": "finetune"}, "--weights: the recipe finetune needs weights"),
        ({"mixup": 0.2, "batch_size": 3}, "--batch-size: mixup and cutmix pair images"),
        (
            {"recompute": "outputs", "compile": "default"},
            "--recompute outputs: only the fused kernels",
        ),
        (
            {"compile": "reduce-overhead", "accumulate": 2},
            "--accumulate: PyTorch loses gradients between passes with --compile reduce-overhead",
        ),
        ({"recompute": "none", "norm": "batchnorm"}, "none: expected --norm abn, got batchnorm"),
        ({"runs": "l\udcfcufe"}, r"--runs: expected printable UTF-8 text, got 'l\udcfcufe'"),
        ({"name": "a\0b"}, r"--name: expected printable UTF-8 text, got 'a\x00b'"),
        ({"loss": "semantic-softmax"}, "--hierarchy: --loss semantic-softmax needs a JSON file"),
        (
            {"loss": "semantic-softmax", "mixup": 0.2},
            "--loss semantic-softmax needs one class an image: expected no --mixup",
        ),
        ({"pad": 8, "opt": "kron"}, "--pad: --opt kron would train another model"),
        ({"recipe": "usi"}, "--teacher: the recipe usi needs a teacher: a tag, a file or timm:N"),
        ({"teacher": "a.pth", "loss": "bce"}, "--teacher: expected --loss cross-entropy or one-"),
        ({"teacher": "a.pth", "batch_size": "auto"}, "cannot be predicted with --teacher"),
        (
            {"progressive_sizes": (64, 128, 160), "epochs": 2},
            "--progressive-sizes: expected at most as many sizes as the 2 epochs",
        ),
        ({"layer_decay": 0.0}, "--layer-decay: expected more than 0, got 0.0"),
        ({"mix_off_epochs": 301}, "--mix-off-epochs: expected at most the 300 epochs"),
        (
            {"sync_bn": True, "norm": "inplace_abn"},
            "--sync-bn: only --norm abn and batchnorm can be synchronised",
        ),
        (
            {"sync_bn": True, "norm": "batchnorm", "device": "cpu"},
            "--sync-bn: PyTorch synchronises batch norm on GPUs only",
        ),
    ],
)
def test_values_out_of_range_and_contradictions_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        validate(configs.replace(GOOD, **change))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change", [{"epochs": 0, "lr": -1.0, "hflip": 2.0}, {"data": None, "recipe": "usi", "pad": 8}]
)
def test_all_problems_are_listed_at_once(change):
    """First those of single values, then the contradictions between values that fit."""
    validate(GOOD)
    with pytest.raises(ConfigError) as error:
        validate(configs.replace(GOOD, **change | {"opt": "kron"}))
    named = {"recipe": "--teacher"}
    assert all(named.get(n, f"--{n}") in str(error.value) for n in change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_batch_norm_is_not_synchronised_where_auto_finds_no_gpu():
    with pytest.raises(ConfigError, match=r"--sync-bn: .* on GPUs only, .* got cpu: leave it out"):
        train(configs.replace(GOOD, sync_bn=True, device="auto"))
