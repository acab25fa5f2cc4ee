"""Test `tresnet bench`: the commands print a table, write a record and report errors."""

import json
import signal

import pytest
import torch

from tresnet.cli.main import main as run
from tresnet.cli.output import PARTLY_FAILED_EXIT_CODE
from tresnet.measure import contenders

SMALL = ["--batch-size", "2", "--input-size", "32", "--rounds", "2"]
SHORT = [*SMALL, "--steps", "1", "--warmup-steps", "1", "--device", "cpu"]
SEARCH = ["max-batch", "timm:test_resnet", "--input-size", "32", "--device", "cpu"]
SEARCH += ["--first", "2", "--granularity", "2", "--at-most", "4"]


def bench(arguments, folder):
    return run(["bench", *arguments, "--output-dir", str(folder)])


def record_in(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_train_prints_a_table_and_writes_a_record(tmp_path, capsys):
    shared = ["--amp", "bf16", "--opt", "adamw", "--ema-decay", "0.9"]
    cases = ["tresnet_t", "timm:test_resnet@channels_last=false,batch_size=3,amp=off"]
    arguments = ["train", *cases, *SHORT, *shared]
    assert bench(arguments, tmp_path) == 0
    printed = capsys.readouterr()
    header, ours, theirs = printed.out.splitlines()
    assert header.split()[:2] == ["case", "size"]
    assert ours.startswith("tresnet_t, batch 2, amp bf16, opt adamw, ema")
    assert theirs.startswith("timm:test_resnet, batch 3, fp32, no channels_last, opt adamw")
    assert "round 2 of 2 done" in printed.err
    record = record_in(tmp_path)
    assert record["what"] == "bench_train"
    assert record["command"].startswith("tresnet bench train tresnet_t timm:test_resnet@")
    assert str(tmp_path) not in json.dumps(record)
    assert (record["warmup_steps"], record["runs"]) == (1, 2)
    assert [row["batch_size"] for row in record["rows"]] == [2, 3]
    assert [row["channels_last"] for row in record["rows"]] == [True, False]


def test_inference_is_folded_unless_asked_otherwise(tmp_path):
    assert (
        bench(["infer", "tresnet_t", "tresnet_t@fold=false", *SHORT, "--sequential"], tmp_path) == 0
    )
    rows = record_in(tmp_path)["rows"]
    assert [row["fold"] for row in rows] == [True, False]
    assert [row["ratio_to_first"] for row in rows] == [None, None]


def test_max_batch_prints_a_table_and_writes_a_record(tmp_path, capsys):
    assert bench(SEARCH, tmp_path) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("timm:test_resnet, batch 2, fp32 ")
    assert line.split()[-6:] == ["4", "at", "most", "4", "-", "ok"]
    assert record_in(tmp_path)["rows"][0]["largest_batch"] == 4


def breaks(monkeypatch, action):
    """Call `action` in place of the second model's set-up; return the command's arguments."""
    prepare = contenders.prepare

    def prepared(case, *arguments):
        return action() if case.model == "timm:test_resnet" else prepare(case, *arguments)

    monkeypatch.setattr(contenders, "prepare", prepared)
    return ["train", "tresnet_t", "timm:test_resnet", *SHORT]


def fail():
    raise KeyError("nobody foresaw this")


@pytest.mark.parametrize(
    ("action", "code", "status", "error"),
    [
        (fail, PARTLY_FAILED_EXIT_CODE, "failed", "KeyError: 'nobody foresaw this'"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted", "error: interrupted"),
    ],
)
def test_a_contender_that_fails_or_is_stopped_leaves_the_table_and_the_record(
    action, code, status, error, tmp_path, monkeypatch, capsys
):
    assert bench(breaks(monkeypatch, action), tmp_path) == code
    assert [row["status"] for row in record_in(tmp_path)["rows"]] == ["ok", status]
    printed = capsys.readouterr()
    assert status in printed.out
    assert error in printed.err
    assert (record_in(tmp_path)["rows"][1]["trace"] or [error])[-1] == error


@pytest.mark.gpu
def test_a_gpu_is_the_default(tmp_path):
    assert bench(["train", "tresnet_t", *SHORT[:-2]], tmp_path) == 0
    record = record_in(tmp_path)
    assert record["environment"]["device"]["type"] == "cuda"
    assert record["rows"][0]["amp"] == "bf16"
    assert record["rows"][0]["max_allocated_mib"] > 0
    assert torch.cuda.is_available()
