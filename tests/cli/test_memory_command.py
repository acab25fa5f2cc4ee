"""`tresnet memory`, its commands run in this process."""

import json

import pytest

from tresnet.cli.main import main
from tresnet.cli.memory import MemoryMaxBatch, MemoryMeasure, MemoryPredict
from tresnet.cli.memory_case import MemoryCase, measure, measure_in_new_process
from tresnet.cli.memory_compare import MemoryCompare
from tresnet.errors import InputError

STEP = {"batch_size": 2, "input_size": 32}


def test_predict_prints_the_three_numbers(capsys):
    assert MemoryPredict(model="tresnet_t", batch_size=4).run([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tresnet_t: train, batch 4 of 3x32x32, fp32, sgd")
    for name in ("allocated", "reserved", "device total", "peak at", "parameters"):
        assert name in out


def test_predict_counts_bytes_as_bytes(capsys):
    mib = {}
    for fed in ("float", "uint8"):
        MemoryPredict(model="tresnet_t", channels_last=True, input=fed, json=True).run([])
        result = json.loads(capsys.readouterr().out)
        mib[fed] = result["allocated"]["mib"]
        assert ("uint8 input" in result["step"]) == (fed == "uint8")
    assert mib["uint8"] < mib["float"]


def test_predict_prints_json(capsys):
    MemoryPredict(model="tresnet_t", batch_size=4, infer=True, json=True).run([])
    result = json.loads(capsys.readouterr().out)
    assert result["allocated"]["low_mib"] < result["allocated"]["mib"]
    assert result["step"].startswith("inference")
    assert result["fits"] is None


def test_predict_writes_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    MemoryPredict(model="tresnet_t", batch_size=4, page=page, plot=picture).run([])
    assert page.is_file()
    assert picture.is_file()


def test_max_batch_prints_an_answer(capsys):
    assert MemoryMaxBatch(model="tresnet_t", gpu_memory="4GiB").run([]) == 0
    assert capsys.readouterr().out.startswith("fits: batch ")


@pytest.mark.parametrize("name", ["tensor", "tresnet_t"])
def test_cases_run_on_a_cpu(name, monkeypatch):
    monkeypatch.setattr("tresnet.memory.subjects.TENSOR_BYTES", 4096)
    phases = measure(MemoryCase(name, {**STEP, "input_dtype": "uint8"}, device="cpu", steps=1))
    expected = ["initial", "define", "delete", "release"]
    assert list(phases) == (
        expected if name == "tensor" else ["initial", "model", "train", "final"]
    )
    for columns in phases.values():
        assert columns["max_allocated_mib"] is None
        assert columns["rss_peak_mib"] > 0


def test_case_in_a_fresh_process():
    case = MemoryCase("tresnet_t", dict(STEP), device="cpu", steps=1)
    result = measure_in_new_process(case, timeout_s=120)
    assert list(result["phases"]) == ["initial", "model", "train", "final"]


def test_failures_of_a_case_are_told():
    result = measure_in_new_process(MemoryCase("tresnet_q", dict(STEP), device="cpu"), 120)
    assert "exit code 2: error: unknown model" in result["error"]


def test_measuring_needs_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="expected a GPU for --device cuda, found none"):
        MemoryMeasure(models=("cnn",), output_dir=tmp_path).run([])


@pytest.mark.parametrize("kind", ["measure", "compare"])
def test_what_cannot_be_measured_or_written_is_known_before_the_work(kind, tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--device", "banana"], "expected a device such as cpu or cuda:0"),
        (["--device", "meta"], "expected a device that computes"),
        (["--device", "xpu:7"], "expected a device of this machine"),
        (["--device", "cpu", "--output-dir", str(tmp_path / "file")], "expected a directory"),
    ):
        full = ["memory", kind, "cnn", "--output-dir", str(tmp_path / "r"), *arguments]
        assert main(full) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_compare_names_every_tool(tmp_path, capsys):
    pytest.importorskip("torchinfo")
    command = MemoryCompare(models=("cnn",), no_measuring=True, output_dir=tmp_path)
    assert command.run(["memory", "compare"]) == 0
    out = capsys.readouterr().out
    (record,) = tmp_path.glob("memory_compare_*.json")
    rows = {row["by"]: row for row in json.loads(record.read_text())["rows"]}
    assert rows["the study, cleaned"]["peak_mib"] == 530.9
    assert abs(rows["predicted"]["peak_error_percent"]) < 0.1
    # What these tools say of the study's CNN.
    assert rows["formula"]["peak_error_percent"] == pytest.approx(19.8, abs=0.1)
    assert rows["torchinfo"]["peak_error_percent"] == pytest.approx(-12.9, abs=0.1)
    assert rows["mem_tracker"]["peak_error_percent"] == pytest.approx(-3.1, abs=0.1)
    assert all(by in out for by in rows)
