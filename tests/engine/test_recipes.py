import json
from pathlib import Path

import pytest

from tests.engine.runs import rows_of
from tresnet.checkpoints.weights import describe
from tresnet.cli.train import parse_train
from tresnet.engine import config as configs
from tresnet.engine.recipes import RECIPES, recipe
from tresnet.engine.resolve import create_model, resolve
from tresnet.engine.train import train
from tresnet.engine.validate import validate
from tresnet.errors import ConfigError
from tresnet.layers.norm import ABN
from tresnet.steps.optim import peak_lr

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.json"


def golden():
    """Return what the golden file should hold."""
    return {name: make().to_dict() for name, make in RECIPES.items()}


def test_golden():
    """After a change on purpose: `python -m tests.golden recipes`."""
    assert golden() == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_itself_and_says_what_else_it_needs(name):
    assert recipe(name).recipe == name
    needed = {"finetune": {"--weights"}, "usi": {"--teacher"}, "in21k": {"--hierarchy"}}
    asked = set()
    try:
        validate(recipe(name))
    except ConfigError as error:
        asked = {line.split()[0].rstrip(":") for line in str(error).splitlines()[1:]}
    of_its_own = name in ("digits", "multilabel")
    expected = set() if of_its_own else {"--data"} | needed.get(name, set())
    assert asked - {"--model", "--new-head"} == expected


# What the papers and the authors' commands say; rates are the first, the highest for so many
# images an update, and the last.
STATED = {
    "usi": {
        "options": {
            "opt": "adamw",
            "weight_decay": 0.02,
            "epochs": 300,
            "mixup": 0.8,
            "cutmix": 1.0,
            "mix_prob": 1.0,
            "aug_repeats": 3,
            "label_smoothing": 0.0,
            "cutout_prob": 0.0,
            "auto_augment": "rand-m7-mstd0.5-inc1",
            "crop_pct": 0.95,
            "kd_weight": 5.0,
            "kd_temperature": 1.0,
            "ema_decay": 0.99996,
            "loss": "cross-entropy",
            "lr_schedule": "cosine",
        },
        "rates": (1e-4, 2e-3, 1024, 1e-6),
        "warmup_epochs": 5,
    },
    "rsb-a2": {
        "options": {
            "opt": "lamb",
            "weight_decay": 0.02,
            "epochs": 300,
            "mixup": 0.1,
            "cutmix": 1.0,
            "mix_prob": 1.0,
            "aug_repeats": 3,
            "label_smoothing": 0.0,
            "cutout_prob": 0.0,
            "auto_augment": "rand-m7-mstd0.5-inc1",
            "crop_pct": 0.95,
            "drop_rate": 0.0,
            "drop_path_rate": 0.05,
            "ema_decay": 0.0,
            "loss": "one-vs-all",
            "lr_schedule": "cosine",
            "hflip": 0.5,
            "random_crop": True,
        },
        "rates": (1e-4, 5e-3, 2048, 1e-6),
        "warmup_epochs": 5,
    },
    "in21k": {
        "options": {
            "opt": "adam",
            "weight_decay": 1e-4,
            "epochs": 80,
            "label_smoothing": 0.2,
            "loss": "semantic-softmax",
            "lr_schedule": "one-cycle",
            "random_crop": False,
            "crop_mode": "squash",
            "crop_pct": 1.0,
            "cutout_area": (0.25, 0.25),
        },
        "rates": (1.5e-5, 3e-4, 64, 1.5e-9),
        "warmup_epochs": 8,
    },
}


@pytest.mark.parametrize("name", STATED)
def test_a_recipe_is_what_its_paper_states(name):
    config, stated = resolve(recipe(name)), STATED[name]
    found = configs.flatten(config)
    assert {option: found[option] for option in stated["options"]} == stated["options"]
    assert config.data.input_size == 224
    first, highest, images, last = stated["rates"]
    schedule = config.schedule
    assert peak_lr(config.optim, images) == pytest.approx(highest)
    assert highest * schedule.start_factor == pytest.approx(first)
    assert highest * schedule.end_factor == pytest.approx(last)
    assert schedule.warmup_fraction * schedule.epochs == pytest.approx(stated["warmup_epochs"])


@pytest.mark.parametrize(
    "options",
    [
        "--weights tresnet_m.miil_in1k_448",
        "--weights tresnet_m.miil_in1k --input-size 448 --crop-mode squash --crop-pct 1",
    ],
)
def test_finetuning_at_448(options):
    arguments = ["--recipe", "finetune", "--data", "flowers", "--layer-decay", "0.8"]
    config = parse_train([*arguments, *options.split()]).config
    validate(config)
    data = resolve(config, weights=describe(config.model.weights)).data
    assert (data.input_size, data.crop_mode, data.crop_pct) == (448, "squash", 1.0)


def test_a_gpu_trains_padded_and_a_resumed_run_as_it_began():
    config = configs.replace(recipe("paper"), model="tresnet_l")
    on_gpu, on_cpu = resolve(config, on_gpu=True), resolve(config)
    assert (on_gpu.model.pad, on_cpu.model.pad) == (8, None)
    assert resolve(configs.replace(config, pad=1), on_gpu=True).model.pad == 1
    assert resolve(configs.replace(config, opt="kron"), on_gpu=True).model.pad is None
    assert configs.resumed(on_gpu, config) == on_gpu
    assert configs.resumed(on_cpu, config) == on_cpu
    model = create_model(configs.replace(on_gpu, width_factor=0.3), ["a", "b"])
    widths = {m.num_features % 8 for m in model.modules() if isinstance(m, ABN)}
    assert widths == {0}


SHORT = {
    "data": "digits",
    "model": "tresnet_t",
    "block_size": 2,
    "width_factor": 0.25,
    "layers": (1, 1, 1, 1),
    "batch_size": 64,
    "workers": 0,
    "device": "cpu",
    "progress": False,
    "tensorboard": False,
    "random_crop": False,
    "hflip": 0.0,
    "crop_pct": 1.0,
    "cutout_prob": 0.0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "least_top1"),
    [
        (
            "usi",
            {"teacher": "tresnet_t_digits", "input_size": 32, "lr": 0.04, "ema_decay": 0.9},
            60,
        ),
        ("rsb-a2", {"input_size": 16, "lr": 0.02, "lr_batch": 64, "epochs": 4}, 70),
        ("in21k", {"input_size": 16, "lr": 3e-3, "epochs": 4}, 70),
    ],
)
def test_a_short_form_of_the_recipe_learns_the_digits(tmp_path, name, changes, least_top1):
    """In seconds: a small network, few epochs, higher rates for the smaller batch."""
    if name == "in21k":
        path = tmp_path / "hierarchy.json"
        path.write_text(json.dumps({"7": "1", "3": "8", "5": "3", "9": "4", "6": "0"}))
        changes |= {"hierarchy": str(path)}
    places = {"data_root": str(tmp_path / "data"), "runs": str(tmp_path / "runs")}
    config = configs.replace(recipe(name), **SHORT, **places, **{"epochs": 3} | changes)
    result = train(config)
    losses = [row["loss"] for row in rows_of(result.run_dir)]
    assert losses[-1] < losses[0]
    assert result.metrics.top1 >= least_top1
