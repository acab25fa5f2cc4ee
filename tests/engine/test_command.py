import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.engine.runs import closed_pipe, eval_main, full_device, train_main, write_images
from tresnet.cli import train_eval as command
from tresnet.cli.train_eval import parse_train
from tresnet.engine import config as configs
from tresnet.engine import distributed
from tresnet.engine.recipes import recipe
from tresnet.errors import DataError
from tresnet.settings.fields import option

ROOT = Path(__file__).resolve().parents[2]


def test_options_change_the_recipes_defaults_by_their_short_names():
    options = (
        "--recipe digits --epochs 3 --batch-size 32 --lr 0.5 --amp bf16 --model tresnet_m"
        " --no-tensorboard --crop-scale 0.5 1 --clip-grad 2 --layers 1 1 1 1"
    )
    parsed = parse_train(options.split())
    changes = {"epochs": 3, "batch_size": 32, "lr": 0.5, "amp": "bf16", "model": "tresnet_m"}
    changes |= {"tensorboard": False, "crop_scale": (0.5, 1.0), "clip_grad": 2.0}
    expected = configs.replace(recipe("digits"), layers=(1, 1, 1, 1), **changes)
    assert (parsed.config, parsed.resume, parsed.dry_run) == (expected, None, False)


def test_resuming_starts_from_the_runs_own_configuration(tiny, tmp_path):
    assert parse_train([]).config == recipe("paper")
    (tmp_path / "config.json").write_text(configs.to_json(tiny(epochs=7)))
    parsed = parse_train(["--resume", str(tmp_path), "--workers", "3"])
    assert parsed.config == tiny(epochs=7, workers=3)
    assert parsed.resume == tmp_path
    auto = parse_train(["--recipe", "digits", "--resume", "auto", "--name", "run"])
    assert auto.config == configs.replace(recipe("digits"), name="run")
    again = parse_train(["--recipe", "paper", f"--resume={tmp_path}"])  # not the recipe's epochs
    assert again.config == tiny(epochs=7, recipe="paper")


def test_a_runs_configuration_starts_another(tiny, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(configs.to_json(tiny(epochs=7)))
    parsed = parse_train(["--config", str(path), "--lr", "0.5"])
    assert parsed.config == tiny(epochs=7, lr=0.5, name=None)


def test_a_dry_run_prints_the_complete_configuration_and_makes_no_run(tiny, capsys):
    assert train_main([*options_of(tiny()), "--dry-run"]) == 0
    printed = configs.from_json(capsys.readouterr().out, "x")
    assert (printed.data.input_size, printed.data.interpolation) == (12, "bilinear")
    assert not Path(tiny().run.runs).exists()


FULL = torch.OutOfMemoryError("tried to allocate 2 GiB")
WORKER = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
GLOO = RuntimeError("[gloo/pair.cc:5] Connection closed")


@pytest.mark.parametrize(
    ("end", "rank", "code", "message"),
    [
        (signal.SIGINT, 0, 130, "^$"),  # as shells expect of a stopped run
        (signal.SIGTERM, 0, 143, "^$"),
        (0, 0, 0, "^$"),
        (KeyboardInterrupt(), 0, 130, "^error: interrupted\n$"),
        (DataError("it is missing"), 3, 2, "^error: process 3: it is missing\n$"),
        (FULL, 0, 2, "^error: the memory is full: tried to allocate 2 GiB: choose a smaller"),
        (WORKER, 0, 1, r"^error: .*DataLoader worker \(pid 7\) is killed by signal: Killed\."),
        (OSError(errno.EMFILE, "Too many open files"), 0, 1, "^error: .*: raise it by ulimit -n"),
        (RuntimeError("Too many open files. Comm"), 0, 1, "^error: .*or try fewer --workers"),
        (GLOO, 0, 1, r"^error: another process .*\[gloo/pair.cc:5\] Connection closed"),
    ],
    ids=str,
)
def test_what_ends_a_run_is_one_message_and_an_exit_code(
    monkeypatch, capsys, end, rank, code, message
):
    result = end if isinstance(end, BaseException) else Mock(stopped_by=int(end))
    monkeypatch.setattr(command, "train", Mock(side_effect=[result]))
    monkeypatch.setenv("RANK", str(rank))
    assert train_main(["--recipe", "digits"]) == code
    assert re.search(message, capsys.readouterr().err)


def options_of(config):
    flat = configs.flatten(config)
    names = "model width_factor data batch_size input_size crop_pct workers epochs device runs name"
    pairs = [(option(name), str(flat[name])) for name in names.split()]
    return [*["--recipe", "digits", "--no-tensorboard", "--block-size", "2"], *chain(*pairs)]


@pytest.mark.slow
def test_a_run_needs_no_terminal_at_all(tiny, tmp_path):
    """A shell or service manager may leave neither descriptor open."""
    train = [sys.executable, str(ROOT / "train.py"), *options_of(tiny(epochs=1))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *train], env=environment, timeout=200
    )
    assert done.returncode == 0
    assert "final,1,6" in (tmp_path / "runs" / "run" / "log.csv").read_text()


def test_a_run_outlives_its_terminal_and_a_lost_result_is_an_error(
    tiny, tmp_path, monkeypatch, data, capsys
):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert train_main(options_of(tiny(epochs=1))) == 0
    run_dir = tmp_path / "runs" / "run"
    assert (run_dir / "log.csv").read_text().splitlines()[-1].startswith("final,1,6")
    arguments = f"--weights {run_dir}/best.safetensors --data {data} --workers 0 --device cpu"
    with full_device() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert eval_main(arguments) == 2
    assert "cannot show the result on standard output" in capsys.readouterr().err
    with full_device() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert eval_main(f"{arguments} --output {tmp_path / 'result.json'}") == 0
    assert json.loads((tmp_path / "result.json").read_text())["images"] == 11


def test_names_may_be_of_any_bytes_and_the_screen_of_any_encoding(tiny, tmp_path, monkeypatch):
    root = tmp_path / "bilder\udcfc"
    write_images(root, ("gr\udcfcn", "blü"), train=12, val=4)
    (root / "val" / "blü" / "\udcff.png").write_bytes(b"no image")
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        config = tiny(epochs=1, data=str(root), runs=str(tmp_path / "läufe"))
        assert train_main([*options_of(config), "--skip-bad-images"]) == 0
        run_dir = Path(config.run.runs) / "run"
        words = f"""--weights {run_dir}/best.safetensors --data {root} --output {tmp_path}/ü.json
            --skip-bad-images --workers 0 --device cpu"""
        assert eval_main(words) == 0
        assert train_main(["--resume", run_dir]) == 0
        with pytest.raises(SystemExit, match="0"):
            train_main(["--help"])
        shown = screen.buffer.getvalue()
    assert b"writing to " in shown
    assert rb"bilder\udcfc/val: top-1" in shown


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "gpus", "found"),
    [
        ("auto", 1, 2, 2, "cuda:1"),
        ("cuda", 0, 1, 2, "cuda:0"),
        ("cpu", 1, 2, 2, "cpu"),
        ("auto", 1, 2, 0, "cpu"),
        ("cuda:0", 0, 2, 2, "2 processes need a GPU each, got the one GPU 'cuda:0'"),
    ],
)
def test_each_process_takes_the_gpu_of_its_rank(name, rank, world_size, gpus, found, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    if found.startswith("c"):
        assert str(distributed.pick_device(name, rank, world_size)) == found
    else:
        with pytest.raises(configs.ConfigError, match=found):
            distributed.pick_device(name, rank, world_size)
