import json
from pathlib import Path

import pytest

from tests.engine.runs import resolved, rows_of
from tresnet.checkpoints.locate import entries
from tresnet.cli.train_eval import parse_train
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig, validate
from tresnet.engine.recipes import RECIPES, recipe
from tresnet.engine.train import train
from tresnet.steps.optim import peak_lr

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.json"


def golden():
    """Return what the golden file should hold: values other than the options' defaults."""
    defaults = configs.flatten(TrainConfig())
    options = {
        name: configs.flatten(make()).items() - defaults.items() for name, make in RECIPES.items()
    }
    return json.loads(
        json.dumps({name: dict(sorted(changed)) for name, changed in options.items()})
    )


def test_golden():
    """Compare with the golden file, which `python -m tests.golden recipes` writes anew."""
    assert golden() == json.loads(GOLDEN.read_text(encoding="utf-8"))


NEEDED = {"finetune": {"weights": "w"}, "usi": {"teacher": "t"}, "in21k": {"hierarchy": "h"}}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_itself_and_needs_no_more_than_it_says(name):
    assert recipe(name).recipe == name
    model = recipe(name).model or "tresnet_m"
    validate(configs.replace(recipe(name), data="d", model=model, **NEEDED.get(name, {})))


# What the papers and the authors' commands say: options; the first rate, the highest for so many
# images a step, and the last; epochs of warm-up.
COMMON = """--weight-decay 0.02 --epochs 300 --cutmix 1 --mix-prob 1 --aug-repeats 3 --cutout-prob 0
    --label-smoothing 0 --auto-augment rand-m7-mstd0.5-inc1 --crop-pct 0.95 --lr-schedule cosine"""
STATED = {
    "usi": (
        f"""--opt adamw --mixup 0.8 --kd-weight 5 --kd-temperature 1 --ema-decay 0.99996
        --loss cross-entropy {COMMON}""",
        (1e-4, 2e-3, 1024, 1e-6),
        5,
    ),
    "rsb-a2": (
        f"""--opt lamb --mixup 0.1 --drop-rate 0 --drop-path-rate 0.05 --ema-decay 0
        --loss one-vs-all --hflip 0.5 --random-crop {COMMON}""",
        (1e-4, 5e-3, 2048, 1e-6),
        5,
    ),
    "in21k": (
        """--opt adam --weight-decay 1e-4 --epochs 80 --label-smoothing 0.2 --loss semantic-softmax
        --lr-schedule one-cycle --no-random-crop --crop-mode squash --crop-pct 1
        --cutout-area 0.25 0.25""",
        (1.5e-5, 3e-4, 64, 1.5e-9),
        8,
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_a_recipe_is_what_its_paper_states(name):
    options, (first, highest, images, last), warmup_epochs = STATED[name]
    assert parse_train(["--recipe", name, *options.split()]).config == recipe(name)
    config = resolved(recipe(name))
    assert config.data.input_size == 224
    schedule = config.schedule
    assert peak_lr(config.step.optim, images) == pytest.approx(highest)
    assert highest * schedule.start_factor == pytest.approx(first)
    assert highest * schedule.end_factor == pytest.approx(last)
    assert schedule.warmup_fraction * schedule.epochs == pytest.approx(warmup_epochs)


@pytest.mark.parametrize("options", ["_448", " --input-size 448 --crop-mode squash --crop-pct 1"])
def test_finetuning_at_448(options):
    line = "--recipe finetune --data flowers --layer-decay 0.8 --weights tresnet_m.miil_in1k"
    config = parse_train(f"--model tresnet_m {line}{options}".split()).config
    validate(config)
    data = resolved(config, entries()[config.weights]).data
    assert (data.input_size, data.crop_mode, data.crop_pct) == (448, "squash", 1.0)


SHORT = """--model tresnet_t --block-size 2 --width-factor 0.25 --layers 1 1 1 1
    --batch-size 64 --workers 0 --device cpu --no-progress --no-tensorboard --no-random-crop
    --hflip 0 --crop-pct 1 --cutout-prob 0"""
DIGITS = "--data digits --input-size 16 --epochs 4"
TAUGHT = "--data digits --input-size 32 --epochs 3 --teacher tresnet_t.digits"
FORMS = {  # of several labels an image, guessing gives 23 %
    "usi": (f"{TAUGHT} --lr 0.04 --ema-decay 0.9", 60),
    "rsb-a2": (f"{DIGITS} --lr 0.02 --lr-batch 64", 70),
    "in21k": (f"{DIGITS} --lr 3e-3 --hierarchy hierarchy.json", 70),
    "digits-multilabel": ("--input-size 32 --epochs 2", 75),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_short_form_of_the_recipe_learns_the_digits(tmp_path, monkeypatch, name):
    """Train in seconds: a small network, few epochs, higher rates for the smaller batch."""
    monkeypatch.chdir(tmp_path)
    options, least_score = FORMS[name]
    parents = {"7": "1", "3": "8", "5": "3", "9": "4", "6": "0"}
    Path("hierarchy.json").write_text(json.dumps(parents))
    result = train(parse_train(["--recipe", name, *SHORT.split(), *options.split()]).config)
    losses = [row["loss"] for row in rows_of(result.run_dir)]
    assert losses[-1] < losses[0]
    assert result.metrics.score >= least_score
