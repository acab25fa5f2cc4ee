"""`tresnet memory`, its commands run in this process."""

import json
import shutil

import pytest

from tresnet.cli.main import main
from tresnet.measure import phases
from tresnet.memory import Workspaces
from tresnet.memory.device import MIB

TINY = ["--batch-size", "4", "--input-size", "32"]


def run(capsys, *argv):
    code = main(["memory", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_predict_prints_the_three_numbers(capsys):
    code, out, _ = run(capsys, "predict", "tresnet_t", "--batch-size", "4")
    assert code == 0
    assert out.startswith("tresnet_t: train, batch 4 of 3x32x32, fp32, sgd")
    for name in ("allocated", "reserved", "device total", "peak at", "parameters"):
        assert name in out


def test_predict_takes_the_settings_of_train_py(capsys):
    settings = "--norm abn --impl reference --recompute outputs --pad 16 --amp bf16 --channels-last"
    settings += " --opt adamw --ema-decay 0.9 --clip-grad 1 --accumulate 2"
    settings += " --grad-checkpointing --input uint8"
    code, out, _ = run(capsys, "predict", "tresnet_t", *settings.split(), "--json")
    result = json.loads(out)
    assert code == 0
    assert result["step"] == (
        "train, batch 64 of 3x32x32, uint8 input, bf16 autocast, adamw, channels_last, "
        "accumulate 2, grad_checkpointing, ema_decay, clip_grad"
    )
    assert result["allocated"]["low_mib"] < result["allocated"]["mib"]
    assert result["fits"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--compile default", "expected compile 'none', got 'default'"),
        ("--cuda-graph", "expected cuda_graph off"),
        ("--opt sgdd", "--opt: timm builds no optimizer 'sgdd'"),
        ("--amp fp8", "expected amp out of"),
        ("--gpu-memory lots", "expected a size such as '80GiB'"),
        ("--workspaces none.json", "expected a table of workspaces at none.json"),
        ("--snapshot none/x.pickle", "cannot write none/x.pickle"),
    ],
)
def test_bad_settings_are_explained(arguments, message, capsys):
    code, _, err = run(capsys, "predict", "tresnet_t", *TINY, *arguments.split())
    assert code == 2
    assert message in err


def test_predict_writes_the_picture_and_the_snapshot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, snapshot = tmp_path / "a.png", tmp_path / "a.pickle"
    ways = ["--plot", str(picture), "--snapshot", str(snapshot)]
    assert run(capsys, "predict", "tresnet_t", *TINY, *ways)[0] == 0
    assert picture.stat().st_size > 0
    assert snapshot.stat().st_size > 0


def test_max_batch_prints_an_answer(capsys):
    code, out, _ = run(capsys, "max-batch", "timm:test_resnet", "--gpu-memory", "1GiB")
    assert code == 0
    assert out.startswith("fits: batch ")


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
    assert "tresnet_t, batch 4: exit code 1: no message" in err
    (record,) = tmp_path.glob("memory_cpu_*.json")
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["status"], row["phases"]) == ("failed", None)


@pytest.mark.parametrize("kind", ["measure", "workspaces"])
@pytest.mark.parametrize("device", ["banana", "cuda:7", "meta"])
def test_a_device_that_is_none_is_refused(kind, device, tmp_path, capsys):
    folder = ["--output-dir" if kind == "measure" else "-o", str(tmp_path / "new")]
    code, _, err = run(capsys, kind, "tresnet_t", "--device", device, *folder)
    assert code == 2
    assert "expected a" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measured(monkeypatch):
    """A meter that says 5 MiB for backward passes, in place of the GPU's."""

    def meter(convolution):
        return 0 if convolution.key.startswith("y ") else 5 * MIB

    monkeypatch.setattr("tresnet.memory.convolutions.cuda_meter", lambda device, benchmark: meter)


def test_a_table_of_workspaces_is_what_predictions_read(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    shared = ["--device", "cpu", "--input-size", "16", "-o", str(path)]
    model = "timm:test_resnet"
    cases = [f"{model}@batch_size=4", f"{model}@amp=bf16,batch_size=2"]
    code, out, _ = run(capsys, "workspaces", *cases, *shared)
    assert code == 0
    content = json.loads(path.read_text())
    assert content["what"] == "workspaces"
    table = Workspaces.load(path).table
    assert {"y", "w", "xw"} <= {key.split()[0] for key in table}
    assert {key.split()[1] for key in table} == {"float32", "bfloat16"}
    assert {key.split()[3].split("x")[0] for key in table} == {"2", "4"}
    assert "at most 5.0 MiB" in out

    bands = []
    for more in ([], ["--workspaces", str(path)]):
        step = ["--batch-size", "4", "--input-size", "16", "--json", *more]
        allocated = json.loads(run(capsys, "predict", model, *step)[1])["allocated"]
        bands.append(allocated["high_mib"] - allocated["mib"])
    assert bands[1] < bands[0] / 4  # measured, so nothing is left to a bound

    code, _, err = run(capsys, "workspaces", "tresnet_t", *shared)
    assert code == 2
    assert "expected a new file to write" in err


def test_what_time_did_not_allow_is_said(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    limits = ["--time-limit-s", "0", "--device", "cpu", "-o", str(path)]
    code, _, err = run(capsys, "workspaces", "tresnet_t", "--batch-size", "2", *limits)
    assert code == 1
    assert json.loads(path.read_text())["workspaces"] == {}
    assert "convolutions not measured" in err


@pytest.mark.parametrize("text", ["", "[]", '{"workspaces": {"a": -1}}', '{"workspaces": [1]}'])
def test_a_bad_table_is_explained(text, tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text(text)
    code, _, err = run(capsys, "predict", "tresnet_t", *TINY, "--workspaces", str(path))
    assert code == 2
    assert "expected a table of workspaces" in err
