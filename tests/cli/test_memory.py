"""Test the commands of `tresnet memory` in this process."""

import json
import shutil

import pytest

from tresnet.cli.main import main
from tresnet.measure import phases

TINY = ["--batch-size", "4", "--input-size", "32"]


def run(capsys, *argv):
    code = main(["memory", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_predict_takes_the_settings_of_train_py(capsys):
    settings = "--norm abn --impl plain --recompute none"
    settings += " --opt adamw --ema-decay 0.9 --clip-grad 1 --accumulate 2"
    settings += " --grad-checkpointing --input uint8 --input-size 32 64"
    code, out, _ = run(capsys, "predict", "tresnet_t", *settings.split(), "--json")
    result = json.loads(out)
    assert code == 0
    assert result["step"] == (
        "train, batch 64 of 3x32x64, uint8 input, bf16 autocast, adamw, channels_last, "
        "accumulate 2, grad_checkpointing, ema_decay, clip_grad"
    )
    assert result["allocated"]["low_mib"] < result["allocated"]["mib"]
    assert result["fits"] is None


def test_predict_prints_memory_and_writes_a_snapshot(tmp_path, capsys):
    snapshot = tmp_path / "a.pickle"
    code, out, _ = run(capsys, "predict", "tresnet_t", *TINY, "--snapshot", str(snapshot))
    assert code == 0
    assert out.startswith("tresnet_t: train, batch 4 of 3x32x32, bf16 autocast, sgd, channels_last")
    for name in (
        "an assumed GPU",
        "allocated",
        "reserved",
        "device total",
        "peak at",
        "parameters",
    ):
        assert name in out
    assert snapshot.stat().st_size > 0


@pytest.mark.parametrize(
    ("memory", "expected", "answer"),
    [
        ("8GiB", 0, "8192.0 MiB\nfits: batch "),
        ("300MiB", 1, "300.0 MiB\nfits: no batch\ndoes not fit: from 1 on\n"),
    ],
)
def test_max_batch_prints_an_answer(memory, expected, answer, capsys):
    code, out, _ = run(capsys, "max-batch", "timm:test_resnet", "--gpu-memory", memory)
    assert code == expected
    assert out.startswith(f"GPU: an assumed GPU, compute capability 8.0, {answer}")


@pytest.mark.slow
def test_measure_writes_a_record_of_fresh_processes(tmp_path, capsys):
    arguments = ["tresnet_t", *TINY, "--device", "cpu", "--output-dir", str(tmp_path)]
    code, out, _ = run(capsys, "measure", *arguments)
    assert code == 0
    assert "final" in out
    (record,) = tmp_path.glob("memory_cpu_*.json")
    (row,) = json.loads(record.read_text())["rows"]
    assert list(row["phases"]) == ["initial", "model", "train", "final"]
    for columns in row["phases"].values():
        assert columns["max_allocated_mib"] is None
        assert columns["rss_peak_mib"] > 0


def test_a_process_that_fails_is_a_row_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(phases.sys, "executable", shutil.which("false"))
    arguments = ["tresnet_t", *TINY, "--device", "cpu", "--output-dir", str(tmp_path)]
    code, _, err = run(capsys, "measure", *arguments)
    assert code == 1
    assert "tresnet_t, batch 4, fp32: exit code 1: no message" in err
    (record,) = tmp_path.glob("memory_cpu_*.json")
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["status"], row["phases"]) == ("failed", None)
