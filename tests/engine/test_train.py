import csv
import itertools
import json
import math
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.engine.conftest import config_on
from tests.engine.runs import (
    assert_same_run,
    at_calls,
    rows_of,
    tensors_of,
    train_main,
    write_images,
)
from tests.toys import same, smallest
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.train_eval import parse_train
from tresnet.engine import config as configs
from tresnet.engine import evaluate as evaluate_module
from tresnet.engine import loop, recovery, run, state
from tresnet.engine.evaluate import Metrics
from tresnet.engine.logs import RunLog
from tresnet.engine.run import why_new_head
from tresnet.engine.train import dry_run, train
from tresnet.errors import CheckpointError, DataError, TrainingError, WriteError
from tresnet.settings import ScheduleConfig
from tresnet.steps import TrainingStep
from tresnet.steps.optim import create_schedule


def at_step(patch, number, action):
    """Do something to the training step after that call of its `optimizer_step`."""
    at_calls(patch, TrainingStep, "optimizer_step", {number}, after=lambda step, *_: action(step))


def train_until(number, config, resume=None, signum=signal.SIGTERM):
    """Train, and send a signal to this process during that call of `optimizer_step`."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, number, lambda _: signal.raise_signal(signum))
        return train(config, resume)


def run_dir_of(config):
    return Path(config.run.runs) / config.run.name


def steps_in(run_dir):
    """Return the optimizer step of the run's last state."""
    return state.read(run_dir / "last.pt").progress.global_step


def test_a_run_leaves_what_its_user_needs(tiny, finished, monkeypatch, capsys):
    saved, save = [], state.save
    monkeypatch.setattr(state, "save", lambda *a: saved.append(a[4].global_step) or save(*a))
    result = train(tiny(mix_off_epochs=1, seed=1, accumulate=2, checkpoint_interval_s=0.0))
    # after each step, before and after each evaluation
    assert saved == [1, 2, 3, 3, 3, 4, 5, 6, 6, 6]
    run_dir = result.run_dir
    files = """.lock best.safetensors config.json environment.json last.pt log.csv log.jsonl
        previous.pt"""
    assert sorted(path.name for path in run_dir.iterdir()) == files.split()
    with (run_dir / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    places = [f"{row['phase']} {row['epoch']} {row['step']}" for row in rows]
    assert places == ["initial 0 0", "model 0 0", "train 1 3", "train 2 6", "final 2 6"]
    for row in rows:
        gpu = ("allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib")
        assert [row[name] for name in gpu] == [""] * 4
        assert float(row["rss_peak_mib"]) > 0
    for row in rows[2:4]:
        for name in ("loss", "lr", "images_per_s", "val_loss", "val_top1"):
            assert float(row[name]) >= 0
        assert row["val_top5"] == ""  # of three classes
    # the labels of the first epoch are mixed
    assert [rows[0]["loss"], rows[1]["loss"], rows[2]["accuracy"]] == [""] * 3
    assert float(rows[3]["accuracy"]) >= 0
    output = capsys.readouterr().out
    (how,) = re.findall("^stages run by (plain modules, .*)$", output, re.MULTILINE)
    (environment,) = json.loads((run_dir / "environment.json").read_text())
    assert environment["implementation"] == how
    for text in (
        "tresnet_t on",
        "8 images per step on each of 1 x cpu, 8 in all",
        "\nrandom weights\n",
        "epoch 2/2  loss",
        f"result: top-1 {result.metrics.top1:.2f} %",
    ):
        assert text in output
    # of another seed; with the same one it would be the same, as all that follows shows
    assert rows_of(run_dir)[0]["loss"] != rows_of(finished)[0]["loss"]


def test_parts_that_kernels_refuse_in_the_first_steps_are_told(tiny, monkeypatch, capsys):
    described = itertools.chain(["Triton kernels"], itertools.repeat("Triton kernels, but ..."))
    monkeypatch.setattr(loop, "describe_implementation", lambda *_: next(described))
    run_dir = train(tiny()).run_dir
    assert capsys.readouterr().out.count("\nstages run by Triton kernels, but ...\n") == 1
    (environment,) = json.loads((run_dir / "environment.json").read_text())
    assert environment["implementation"] == "Triton kernels, but ..."
    assert environment["processes"] == 1


def test_deterministic_is_pytorchs_switch_without_cudnns_search(tiny, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        dry_run(tiny(deterministic=True))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_best_checkpoint_says_what_it_is_and_gives_its_figures_again(tiny):
    model = {"norm": "batchnorm", "jit": True, "block_size": 1}
    often = {"eval_interval": 2, "log_interval": 4, "input_size": (12, 20)}
    result = train(tiny(mixup=0.0, epochs=3, lr=0.1, **model, **often))
    rows = [row for row in rows_of(result.run_dir) if row["val_top1"] is not None]
    assert [row["epoch"] for row in rows] == [2, 3]
    best = max(rows, key=lambda row: (row["val_top1"], -row["val_loss"]))
    info = open_checkpoint(result.run_dir / "best.safetensors")
    assert info.classes == ("blue", "green", "red")
    cfg = info.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_pct"]) == ((3, 12, 20), 1.0)
    chosen = {**model, "drop_rate": 0.2, "drop_path_rate": 0.2, "layers": (1, 1, 1, 1)}
    saved = configs.flatten(configs.load(result.run_dir / "config.json"))
    assert chosen.items() <= saved.items()
    built = info.config
    assert (built.variant, built.block_size, built.layers) == ("tresnet_t", 1, (1, 1, 1, 1))
    assert info.user["epoch"] == best["epoch"]
    assert info.user["top1"] == best["val_top1"] == result.metrics.top1
    assert result.metrics.loss == pytest.approx(best["val_loss"], rel=1e-6)
    assert state.read(result.run_dir / "last.pt").progress.last_score == rows[-1]["val_top1"]


def test_between_equal_accuracies_the_lower_loss_is_best(tiny, monkeypatch):
    scores = [(0.5, 50), (0.4, 50), (0.6, 50), (0.1, 40), (0.4, 50)]
    metrics = [Metrics(11, loss, top1, 100) for loss, top1 in scores]
    monkeypatch.setattr(run, "evaluate", Mock(side_effect=metrics))
    result = train(tiny(epochs=4))
    user = open_checkpoint(result.run_dir / "best.safetensors").user
    assert (user["epoch"], user["loss"]) == (2, 0.4)


VARIED = {"accumulate": 4, "clip_grad": 1.0, "cutout_prob": 0.5, "affine_degrees": 20.0}
# the loss scale is halved at the first step
VARIED |= {"amp": "fp16", "ema_decay": 0.0, "opt": "adamw", "lr_schedule": "cosine", "reprob": 0.5}
VARIED |= {"sampler": "balanced"}


THAWED = VARIED | {"epochs": 3, "freeze_epochs": 1, "ema_decay": 0.9, "layer_decay": 0.8}
THAWED |= {"train_only": ("layer3", "layer4", "head"), "opt": "lamb", "lr": 0.02}


@pytest.fixture(scope="module")
def varied(data, tmp_path_factory):
    """The directory of a finished run, with accumulation over four batches and varied images."""
    return train(config_on(data, tmp_path_factory.mktemp("varied"), **VARIED)).run_dir


@pytest.fixture(scope="module")
def thawed(data, tmp_path_factory):
    """The directory of a finished run that trains the head in its first epoch, then more."""
    return train(config_on(data, tmp_path_factory.mktemp("thawed"), **THAWED)).run_dir


@pytest.mark.parametrize(
    ("options", "step", "signum", "workers"),
    [
        # 6 micro-batches an epoch, 4 a step: steps 1 and 3 end within an epoch, 2 and 4 at its end
        (VARIED, 2, signal.SIGINT, 0),
        (VARIED, 3, signal.SIGTERM, 1),
        (VARIED, 3, signal.SIGUSR1, 0),
        *((THAWED, step, signal.SIGTERM, 0) for step in (1, 2, 3, 6)),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    tiny, varied, thawed, capsys, options, step, signum, workers
):
    config = tiny(**options, workers=workers)
    stopped = train_until(step, config, signum=signum)
    assert stopped.stopped_by == signum
    assert stopped.metrics is None
    assert f"stopped by {signum.name} after step {step}, saved" in capsys.readouterr().out
    assert steps_in(stopped.run_dir) == step
    if options is THAWED:
        states = torch.load(stopped.run_dir / "last.pt", weights_only=True)["optimizer"]["state"]
        assert (len(states) == 2) == (step <= 2)  # a weight and a bias; step 2 is in the epoch
    torch.rand(7)  # whatever happened in this process meanwhile
    resumed = train(config, resume=stopped.run_dir)
    assert resumed.stopped_by == 0
    assert_same_run(resumed.run_dir, varied if options is VARIED else thawed)


def test_a_run_that_thaws_first_trains_the_head_alone_by_one_schedule(tiny, thawed, capsys):
    """Compare with a run of the head alone, and its rates with one that trains everything."""
    options = THAWED | {"freeze_epochs": 0, "train_only": ("head",)}
    head = train_until(2, tiny(**options, name="head")).run_dir
    first = train_until(2, tiny(**THAWED, name="first")).run_dir
    expected = tensors_of(head)
    initial = state.read(head / "last.pt").state
    for name, tensor in tensors_of(first).items():
        assert torch.equal(tensor, expected[name]), name
    train(tiny(**THAWED, name="first"), resume=first)
    output = capsys.readouterr().out
    last = state.read(thawed / "last.pt").state["model"]
    kept = ("body.conv1", "body.layer1", "body.layer2")
    for name, tensor in initial["model"].items():
        assert torch.equal(tensor, last[name]) == name.startswith(kept), name
    named = smallest().named_parameters()
    count = sum(p.numel() for name, p in named if not name.startswith(kept))
    assert "771 of 125,931 parameters train, the others are frozen\n" in output
    assert f"\nepoch 2: {count:,} of 125,931 parameters train, the others are" in output
    whole = train(tiny(**THAWED | {"freeze_epochs": 0, "train_only": None}, name="whole")).run_dir
    assert [row["lr"] for row in rows_of(whole)] == [row["lr"] for row in rows_of(thawed)]


def test_a_finished_run_only_shows_its_result_again(tiny, finished, tmp_path, capsys):
    def content():
        return {path: path.read_bytes() for path in finished.iterdir() if path.name != ".lock"}

    before, again = content(), shutil.copytree(finished, tmp_path / "again")
    (again / "log.jsonl").write_bytes(b"\0" * 500)
    for run_dir in (finished, again):  # also without its log
        metrics = train(configs.load(finished / "config.json"), resume=run_dir).metrics
        assert metrics.top1 == rows_of(finished, "final")[0]["val_top1"]
        assert "result: top-1" in capsys.readouterr().out
    assert content() == before


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is cleaned up but the lock."""


def fail_at(patch, point, error):
    """Raise the error before or after something that the run does for the n-th time."""
    when, what, number = point.split()
    place, name = {
        "state": (state, "save"),
        "best": (recovery, "save_checkpoint"),
        "row": (RunLog, "phase"),
        "evaluation": (run, "evaluate"),
    }[what]
    at_calls(patch, place, name, {int(number)}, **{when: Mock(side_effect=error)})


@pytest.mark.parametrize(
    ("options", "point", "error", "message"),
    [
        ({}, "after row 2", Killed(), "^$"),  # model: there is no state yet
        ({}, "before state 2", Killed(), "^$"),  # the best is saved and the epoch's row written
        ({}, "after best 2", Killed(), "^$"),
        ({}, "after state 4", Killed(), "^$"),
        ({}, "before row 5", Killed(), "^$"),  # final
        ({}, "before evaluation 1", DataError("no image"), "^no image; .* of step 6: continue"),
        *(
            (THAWED, f"{when} state {n}", Killed(), "^$")
            for when, n in (("before", 1), ("before", 2), ("after", 2))
        ),
    ],
)
def test_a_run_that_ends_anywhere_resumes_with_no_row_lost_or_doubled(
    tiny, finished, thawed, monkeypatch, options, point, error, message
):
    with monkeypatch.context() as patch:
        fail_at(patch, point, error)
        with pytest.raises(type(error), match=message):
            train(tiny(**options))
    resumed = train(tiny(**options), resume=Path("auto")).run_dir
    assert_same_run(resumed, thawed if options else finished)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b'{"a":\n'])
def test_damaged_files_do_not_keep_a_run_from_going_on(tiny, finished, capsys, content):
    stopped = train_until(8, tiny()).run_dir
    names = ["environment.json", "log.csv", "config.json"]
    if content is not None:
        names.append("last.pt")
    for path in (stopped / name for name in names):
        path.unlink() if content is None else path.write_bytes(content)
    (stopped / ".last.pt.0123456789abcdef.tmp").touch()
    files = {path.name: path.read_bytes() for path in stopped.iterdir() if path.name != ".lock"}
    dry_run(tiny(), resume=stopped)
    assert all((stopped / name).read_bytes() == found for name, found in files.items())
    train(tiny(), resume=stopped)
    assert ("continuing from" in capsys.readouterr().out) == (content is not None)
    assert_same_run(stopped, finished)
    assert not list(stopped.glob("*.tmp"))
    assert configs.load(stopped / "config.json").schedule.epochs == 2


def test_a_finished_run_of_a_constant_rate_goes_on_for_longer_from_anywhere(
    tiny, data, tmp_path, monkeypatch
):
    """Compare with a run that had as many epochs and warm-up steps from the beginning."""
    options = {"lr_schedule": "constant", "mixup": 0.0}
    longer = train(tiny(epochs=4, warmup_fraction=0.125, name="longer", **options)).run_dir
    monkeypatch.chdir(data.parent)
    short = tiny(epochs=2, warmup_fraction=0.25, name="short", data=data.name, **options)
    run_dir = train(short).run_dir
    monkeypatch.chdir(tmp_path)
    saved = configs.load(run_dir / "config.json")
    train(configs.replace(saved, epochs=4), resume=run_dir)
    expected = tensors_of(longer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(run_dir).items())
    assert rows_of(run_dir) == rows_of(longer)
    assert len(rows_of(run_dir, "final")) == 1
    written = configs.load(run_dir / "config.json")
    assert (written.schedule.epochs, written.schedule.warmup_fraction) == (4, 0.125)


def test_the_logged_rate_is_that_of_the_last_step(tiny, finished):
    """Compare with the rates of the schedule over 12 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    made = create_schedule(optimizer, ScheduleConfig(epochs=2), 12)
    used = []
    for _ in range(12):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert [row["lr"] for row in rows_of(finished)] == pytest.approx([used[5], used[11]])


def test_a_full_disk_says_so_and_a_run_that_had_no_state_frees_its_name(
    tiny, finished, monkeypatch
):
    run_dir = run_dir_of(tiny())
    save = torch.save
    saves = itertools.count(1)

    def filling_up(content, stream):
        with open("/dev/full", "wb") as full:
            save(content, full if next(saves) == fails_at else stream)

    monkeypatch.setattr(torch, "save", filling_up)
    fails_at = 1
    with pytest.raises(WriteError, match=r"last\.pt: No space left .*free some space; there is no"):
        train(tiny())
    assert not run_dir.exists()
    fails_at, saves = 3, itertools.count(1)
    with pytest.raises(WriteError, match="free some space; the last good checkpoint is"):
        train(tiny())
    assert_same_run(train(tiny(), resume=run_dir).run_dir, finished)


def spoil(monkeypatch, micro_batches, loss=None):
    """Some micro-batches return this loss; without one their images, and so all, are NaN."""
    original, count = TrainingStep.backward, itertools.count(1)

    def backward(self, images, *args):
        if next(count) not in micro_batches:
            return original(self, images, *args)
        if loss is None:
            return original(self, images.float() * math.nan, *args)
        found, logits = original(self, images, *args)
        return found * 0 + loss, logits

    monkeypatch.setattr(TrainingStep, "backward", backward)


GOOD = " (nan or infinite): the last good checkpoint is of step 6: continue with --resume {0}; try"


@pytest.mark.parametrize("epochs", [{2}, {1, 2, 3}])
def test_an_epoch_with_outputs_that_are_not_finite_cannot_become_the_best(
    tiny, monkeypatch, capsys, epochs
):
    """Weights stay finite, as where activations overflow in 16 bits."""
    evaluations, calls = itertools.count(1), evaluate_module.finite

    def finite(logits):
        good = calls(logits)
        return torch.zeros_like(good) if epoch in epochs else good

    def evaluate(*args, **kwargs):
        nonlocal epoch
        epoch = next(evaluations)
        return original(*args, **kwargs)

    epoch, original = 0, run.evaluate
    monkeypatch.setattr(run, "evaluate", evaluate)
    monkeypatch.setattr(evaluate_module, "finite", finite)
    config = tiny(epochs=3, mixup=0.0)
    if len(epochs) == 3:
        with pytest.raises(TrainingError, match="no epoch's outputs on the validation images are"):
            train(config)
        return
    run_dir = train(config).run_dir
    scores = [row["val_top1"] for row in rows_of(run_dir)]
    assert [score is None for score in scores] == [False, True, False]
    line = (
        "epoch 2 cannot become the best: expected finite outputs, got infinities or NaN for 11 of"
    )
    assert line in capsys.readouterr().out
    assert open_checkpoint(run_dir / "best.safetensors").user["epoch"] != 2


def head_to_nan(step):
    step.model.head.fc.weight.data[0, 0].fill_(math.nan)


@pytest.mark.parametrize(
    ("spoiled", "options", "message"),
    [
        (({9}, math.nan), {}, f"the loss is not finite at step 9, in epoch 2{GOOD}"),
        (
            ({2}, math.inf),
            {},
            "at step 2, in epoch 1 (nan or infinite): there is no checkpoint yet; try more"
            " --skip-bad-steps, or in a new run a lower --lr, --clip-grad or another --amp",
        ),
        (({8, 9, 10},), {"skip_bad_steps": 2}, f"not finite at step 10, in epoch 2{GOOD}"),
        (None, {}, f"the weights are not finite after step 12{GOOD}"),
    ],
)
def test_what_is_no_number_stops_the_run_and_keeps_the_last_good_state(
    tiny, monkeypatch, spoiled, options, message
):
    if spoiled is None:
        at_step(monkeypatch, 12, head_to_nan)
    else:
        spoil(monkeypatch, *spoiled)
    with pytest.raises(TrainingError) as error:
        train(tiny(**options))
    run_dir = run_dir_of(tiny())
    assert message.format(run_dir) in str(error.value)
    assert not run_dir.exists() if "no checkpoint" in message else steps_in(run_dir) == 6


SKIPPING = {"accumulate": 2, "skip_bad_steps": 2, "clip_grad": 1.0, "log_interval": 2}


def test_bad_steps_are_counted_and_resume_bit_for_bit(tiny, monkeypatch, capsys):
    # 3 optimizer steps of 2 micro-batches an epoch: steps 1 and 4 are bad
    with monkeypatch.context() as patch:
        spoil(patch, {2, 7})
        finished = train(tiny(**SKIPPING, name="finished")).run_dir
    assert [row["bad_steps"] for row in rows_of(finished)] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows_of(finished))
    assert "step 4 skipped: its loss or gradient is not finite (2 of 2" in capsys.readouterr().out

    with monkeypatch.context() as patch:
        spoil(patch, {2, 7})
        stopped = train_until(2, tiny(**SKIPPING)).run_dir  # in step 3, as step 1 is skipped
    assert state.read(stopped / "last.pt").progress.bad_steps == 1
    spoil(monkeypatch, {1})
    # the number of allowed steps may change
    train(tiny(**SKIPPING | {"skip_bad_steps": 3}), resume=stopped)
    assert_same_run(stopped, finished)


def test_sizes_follow_one_another_and_resume_where_they_were(tiny, monkeypatch):
    options = {"progressive_sizes": (12, 16)}
    seen, feed = [], TrainingStep.backward

    def backward(self, images, *args):
        seen.append(images.shape[-1])
        return feed(self, images, *args)

    monkeypatch.setattr(TrainingStep, "backward", backward)
    progressive = train(tiny(**options, name="finished")).run_dir
    assert seen == [12] * 6 + [16] * 6
    cfg = open_checkpoint(progressive / "best.safetensors").pretrained_cfg
    assert cfg["input_size"] == (3, 12, 12)
    options |= {"workers": 1}
    assert train_until(8, tiny(**options), Path("auto")).stopped_by == signal.SIGTERM
    assert_same_run(train(tiny(**options), resume=Path("auto")).run_dir, progressive)


def test_images_damaged_during_a_run_stop_it_or_are_skipped_and_counted(tiny, tmp_path, capsys):
    write_images(tmp_path / "images", train=12, val=6)
    config = tiny(data=str(tmp_path / "images"), mixup=0.0)
    run_dir = train_until(3, config).run_dir
    for split in ("val", "train"):
        file = next((tmp_path / "images" / split / "red").iterdir())
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DataError, match=r"\.png cannot be .* --skip-bad-images; the last good"):
        train(config, resume=run_dir)
    config = configs.replace(config, skip_bad_images=True)
    train(config, resume=run_dir)
    result = train(config, resume=run_dir)  # which trains no more, and knows what was skipped
    assert (result.metrics.images, result.metrics.skipped) == (5, 1)
    assert capsys.readouterr().out.count("left out: 1 to train, 1 to validate") == 2


def test_a_head_is_new_where_the_classes_differ(tiny, tmp_path, finished, capsys):
    best = str(finished / "best.safetensors")
    options = {"weights": best, "epochs": 1}
    options |= dict.fromkeys(("model", "layers", "width_factor"))
    write_images(tmp_path / "cats", ("cat", "dog"), train=12, val=6)
    result = train(tiny(**options, data=str(tmp_path / "cats")))
    assert open_checkpoint(result.run_dir / "best.safetensors").classes == ("cat", "dog")
    out = capsys.readouterr().out
    body = f"weights from {best}; head new, as the weights have"
    assert f"{body} 3 classes, the data 2 (cat, dog)\n" in out
    config, weights = tiny(), open_checkpoint(best)
    for classes, changes, reason in (
        (["blue", "green", "red"], {}, None),
        (["red", "green", "blue"], {}, None),
        (["cat", "dog", "red"], {}, "only the weights have blue, green; only the data have cat"),
        (["blue", "green", "red"], {"head": "ml_decoder"}, "the head linear, got ml_decoder"),
    ):
        found = why_new_head(configs.replace(config, **changes), weights, classes, False)
        assert found is reason or reason in found


def test_a_continued_run_keeps_its_head(tiny, finished, capsys):
    """Start from the weights and the configuration of a run that began with a new head."""
    options = {"model": None, "layers": None, "width_factor": None, "ema_decay": 0.0, "epochs": 1}
    config = tiny(**options, weights=str(finished / "best.safetensors"))
    first = train(config, new_head=True).run_dir
    assert "head new, as --new-head is given, though the weights have" in capsys.readouterr().out
    words = ["--config", str(first / "config.json"), "--name", "second", "--lr", "1e-15"]
    assert train_main([*words, "--weights", first / "best.safetensors"]) == 0
    out = capsys.readouterr().out
    assert f"\nweights from {first}/best.safetensors\n" in out
    old, own, kept = (
        open_checkpoint(run_dir / "best.safetensors").tensors["head.fc.weight"]
        for run_dir in (finished, first, first.with_name("second"))
    )
    assert torch.allclose(own, kept, atol=1e-6)
    assert not torch.allclose(old, own, atol=1e-2)
    train(config, first, new_head=True)
    assert "--new-head has no effect: a resumed run keeps its head" in capsys.readouterr().out


def test_a_run_goes_on_without_the_weights_it_started_from(tiny, tmp_path, monkeypatch):
    """Compare with an uninterrupted run; the deleted weights set model, images, order of labels."""
    weights = tmp_path / "start.safetensors"
    start = smallest()
    start.set_slopes(0.2, 0.1)
    start.pretrained_cfg |= {"input_size": (3, 12, 12), "crop_mode": "squash", "tag": "own"}
    save_checkpoint(start, weights, metadata={"classes": ["red", "blue", "green"]})
    options = {"weights": str(weights)}
    options |= dict.fromkeys(("model", "layers", "width_factor", "input_size", "crop_mode"))
    uncut = train(tiny(**options, name="uncut")).run_dir
    stopped = train_until(8, tiny(**options)).run_dir
    weights.unlink()
    copy = shutil.copytree(stopped, stopped.with_name("copy"))
    monkeypatch.chdir(copy)
    for config, resume in (
        (tiny(**options), Path("auto")),
        (parse_train(["--resume", "."]).config, copy),
    ):
        run_dir, best = train(config, resume=resume).run_dir, "best.safetensors"
        assert_same_run(run_dir, uncut)
        assert open_checkpoint(run_dir / best).classes == ("red", "blue", "green")
        assert same(*(open_checkpoint(folder / best).tensors for folder in (run_dir, uncut)))
    with pytest.raises(CheckpointError, match="start"):
        train(tiny(**options, name="new"))


@pytest.mark.parametrize(
    ("waiting", "workers", "cores", "processes", "needed", "remedies"),
    [
        (57, 15, 16, 1, 2.3, ["--pixels`: x 7", "--short-side 256`", "--workers 16 (now 15)"]),
        (90, 2, 32, 1, 10.0, ["--workers 20 (now 2): x 10.0", "--pixels`", "--short-side 256`"]),
        (50, 4, 32, 4, 2.0, ["--pixels`", "--workers 8 (now 4): x 2.0", "--short-side 256`"]),
        (50, 8, 8, 1, 2.0, ["--pixels`", "--short-side 256`"]),  # all cores load images
        (50, 0, 8, 1, 2.0, ["--pixels`", "--workers 1 (now 0): x 2.0", "--short-side 256`"]),
        (50, 1, 4, 1, 2.0, ["--workers 2 (now 1): x 2.0"]),
        (50, 4, 4, 1, 2.0, []),
    ],
)
def test_remedies_of_waiting_for_data_begin_with_the_best(
    monkeypatch, waiting, workers, cores, processes, needed, remedies
):
    monkeypatch.setattr(loop, "usable_cores", lambda: cores)
    assert "--short-side" not in loop.stall_warning(waiting, workers, processes, 32)
    rgb = any("--pixels" in remedy for remedy in remedies)  # shards are of RGB
    warning = loop.stall_warning(waiting, workers, processes, 375, rgb=rgb)
    assert f"{waiting} % of the time" in warning
    assert f"should be {needed} times as fast" in warning
    _, *parts = warning.split("; ")
    assert all(remedy in part for remedy, part in zip(remedies, parts, strict=True))
