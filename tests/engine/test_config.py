import json
import re
import shutil
from pathlib import Path

import pytest

from tests.engine.runs import rows_of, write_images
from tests.settings.test_fields import every_field
from tresnet.cli.train_eval import parse_train
from tresnet.engine import config as configs
from tresnet.engine import state
from tresnet.engine.config import TrainConfig, validate
from tresnet.engine.recipes import RECIPES
from tresnet.engine.resolve import absolute, resumed
from tresnet.engine.train import train
from tresnet.environment import __version__
from tresnet.errors import ConfigError
from tresnet.settings import fields

RUN_OF_0_1_0 = Path(__file__).parent / "run_of_0_1_0"
MISFITS = (
    r"^x, written by tresnet 7\.0: unknown setting 'larse': .*; unknown setting 'pad': expected one"
    r" of .*: correct or remove them, or go on with tresnet 7\.0, as this is tresnet"
)
GOOD = configs.replace(TrainConfig(), model="tresnet_t", data="somewhere")


def test_every_field_has_an_option_of_its_own():
    assert sorted(name for name, _ in every_field(TrainConfig)) == sorted(configs.flatten(GOOD))


@pytest.mark.parametrize("name", RECIPES)
def test_json_gives_the_same_configuration_back(name):
    """Include a path of bytes that are not UTF-8, and an integer for a setting of type float."""
    options = {"layers": (1, 2, 2, 1), "data": "\udcfc"}
    config = configs.replace(RECIPES[name](), clip_grad=1.0, **options)
    groups = json.loads(configs.to_json(config)).values()
    names = [name for group in groups if isinstance(group, dict) for name in group]
    assert sorted([*names, "recipe"]) == sorted(configs.flatten(config))
    text = configs.to_json(config).replace('"clip_grad": 1.0', '"clip_grad": 1')
    assert configs.from_json(text, "x") == config
    assert isinstance(configs.from_json(text, "x").step.optim.clip_grad, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x is not the JSON of a configuration: Expecting"),
        ("[" * 99999 + "]" * 99999, "x is not the JSON of a configuration: expected one object"),
        ("[]", "x is not the JSON of a configuration: expected one object"),
        ('{"optim": 3}', "x, written by .* unknown version: unknown setting 'optim': did"),
        ('{"tresnet": "7.0", "model": {"pad": 3}, "optim": {"larse": 0}}', MISFITS),
        ('{"model": {"layers": [1, "2", 1, 1]}}', "x: layers: expected a valid integer, got '2'"),
        ('{"model": {"layers": 3}}', "x: layers: expected a valid tuple, got 3"),
        ('{"optim": {"lr": "3"}}', "x: lr: expected a valid number, got '3'"),
        ('{"optim": {"lr": true}}', "x: lr: expected a valid number, got True"),
        ('{"optim": {"lr": NaN}}', "x: lr: expected a finite number, got nan"),
    ],
)
def test_json_that_does_not_fit_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        configs.from_json(text, "x")
    assert re.search(message, str(error.value))


def test_a_run_of_0_1_0_is_resumed_and_starts_another(tmp_path, monkeypatch):
    """Resume from a directory of version 0.1.0; only the images are written here."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", suffix=".bmp", train=12, val=4)
    run_dir = shutil.copytree(RUN_OF_0_1_0, tmp_path / "run")
    arguments = ["--resume", "run", "--data", "images", "--epochs", "2"]
    result = train(parse_train(arguments).config, run_dir)
    saved = state.read(run_dir / "last.pt")
    assert (saved.progress.epoch, saved.progress.global_step) == (2, 6)
    assert [row["epoch"] for row in rows_of(run_dir)] == [1, 2]
    assert json.loads((run_dir / "config.json").read_text())["tresnet"] == __version__
    start = ["--config", str(RUN_OF_0_1_0 / "config.json"), "--data", "images"]
    config = parse_train([*start, "--weights", str(run_dir / "best.safetensors")]).config
    assert train(config).metrics.images == result.metrics.images == 4


def test_resuming_with_other_options_lists_those_that_alter_the_result():
    free = configs.replace(GOOD, workers=1, log_interval=3, data="moved", track="wandb")
    assert configs.replace(free, **resumed(GOOD, configs.flatten(free), Path())) == free
    now = configs.flatten(free) | {"epochs": 7, "lr": 0.5}
    with pytest.raises(ConfigError) as error:
        resumed(GOOD, now, Path("a/best.safetensors"))
    first, *options, last = str(error.value).splitlines()
    assert first.endswith("but these options differ:")
    assert sorted(options) == ["  --epochs was 300, now 7", "  --lr was 0.1, now 0.5"]
    assert "(--weights a/best.safetensors starts it from this one's weights)" in last
    assert "more --epochs are for a run of --lr-schedule constant without" in last


def test_a_constant_rate_goes_on_for_more_epochs_after_a_warm_up_as_long():
    constant = configs.replace(GOOD, lr_schedule="constant", epochs=10, warmup_fraction=0.25)
    found = resumed(constant, configs.flatten(constant) | {"epochs": 40}, Path())
    assert found["warmup_fraction"] == 0.0625
    for changes in ({"epochs": 9}, {"epochs": 40, "lr": 0.5}):
        with pytest.raises(ConfigError, match="these options differ"):
            resumed(constant, configs.flatten(constant) | changes, Path())
    for option in ({"mix_off_epochs": 2}, {"progressive_sizes": (64, 96)}):
        ends = configs.replace(constant, **option)
        with pytest.raises(ConfigError, match="--epochs was 10, now 40"):
            resumed(ends, configs.flatten(ends) | {"epochs": 40}, Path())


def test_paths_of_existing_files_are_stored_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("images", "digits"):
        (tmp_path / name).mkdir()
    (tmp_path / "parents.json").touch()
    given = {"hierarchy": "parents.json", "teacher": "tresnet_m.miil_in1k"}
    found = absolute(configs.replace(GOOD, data="images", **given))
    assert found == {"data": str(tmp_path / "images"), "hierarchy": str(tmp_path / "parents.json")}
    for data in ("digits", "absent", None):
        assert not absolute(configs.replace(GOOD, data=data))


# The nearest values that are outside of each range, and those at its ends.
OUTSIDE = {
    **dict.fromkeys(("batch_size", "input_size", "block_size"), 0),
    **dict.fromkeys(("epochs", "lr_batch", "accumulate", "aug_repeats", "eval_interval"), 0),
    **dict.fromkeys(("lr", "clip_grad", "width_factor", "kd_temperature", "crop_pct"), 0.0),
    **dict.fromkeys(("layer_decay", "start_factor", "end_factor", "cutout_min_aspect"), 0.0),
    **dict.fromkeys(("momentum", "ema_decay", "drop_rate", "drop_path_rate", "prob_margin"), 1.0),
    **dict.fromkeys(("label_smoothing", "bce_target_thresh"), 1.0),
    **dict.fromkeys(("warmup_fraction", "mix_prob", "threshold", "hflip", "cutout_prob"), 1.01),
    **dict.fromkeys(("weight_decay", "mixup", "cutmix", "kd_weight", "gamma_neg"), -0.01),
    **dict.fromkeys(("gamma_pos", "checkpoint_interval_s", "affine_degrees"), -0.01),
    **dict.fromkeys(("workers", "skip_bad_steps", "mix_off_epochs"), -1),
    **{"log_interval": 0, "seed": 2**63, "amp": "fp8", "progressive_sizes": (0,)},
}
ENDS = {
    **dict.fromkeys(("layer_decay", "start_factor", "end_factor", "warmup_fraction"), 1.0),
    **dict.fromkeys(("momentum", "ema_decay", "weight_decay", "prob_margin", "hflip"), 0.0),
    **{"lr": 1, "batch_size": 2, "workers": 0, "seed": 2**63 - 1, "crop_pct": 1.0, "mixup": 0.0},
}


def test_all_values_out_of_range_are_listed_at_once():
    validate(configs.replace(GOOD, **ENDS))
    with pytest.raises(ConfigError) as error:
        validate(configs.replace(GOOD, **OUTSIDE))
    first, *lines = str(error.value).splitlines()
    assert first == "the configuration is invalid:"
    assert {line.split(":")[0].strip() for line in lines} == set(map(fields.option, OUTSIDE))
