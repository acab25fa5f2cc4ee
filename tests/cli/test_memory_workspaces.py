"""`tresnet memory workspaces` with a meter that stands for the GPU's."""

import json

import pytest

from tresnet.cli.main import main
from tresnet.cli.memory import MemoryPredict
from tresnet.cli.memory_workspaces import MemoryWorkspaces
from tresnet.errors import InputError
from tresnet.memory import Workspaces
from tresnet.memory.sizes import MIB


@pytest.fixture
def measured(monkeypatch):
    """A meter that says 5 MiB for backward passes, and the keys it was asked about."""
    keys = []

    def meter(convolution):
        keys.append(convolution.key)
        return 0 if convolution.key.startswith("y ") else 5 * MIB

    monkeypatch.setattr("tresnet.memory.convolutions.cuda_meter", lambda device, benchmark: meter)
    monkeypatch.setattr("tresnet.env.describe", lambda device: {"device": {"type": str(device)}})
    return keys


def test_the_table_is_what_predictions_read(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    argv = ["memory", "workspaces", "tresnet_t", "-o", str(path)]
    argv += ["--batch-size", "2", "4", "--amp", "fp32", "bf16", "--input-size", "16"]
    assert main(argv) == 0
    content = json.loads(path.read_text())
    assert content["what"] == "workspaces"
    assert content["command"].startswith("tresnet memory workspaces tresnet_t -o table.json")
    assert content["environment"] == {"device": {"type": "cuda"}}
    table = Workspaces.load(path).table
    assert sorted(table) == sorted(set(measured)) == sorted(measured)  # each measured once
    assert {"y", "w", "xw"} <= {key.split()[0] for key in table}
    assert {key.split()[1] for key in table} == {"float32", "bfloat16"}
    assert {key.split()[3].split("x")[0] for key in table} == {"2", "4"}
    printed = capsys.readouterr()
    assert f"{len(table)} convolutions measured" in printed.out
    assert "at most 5.0 MiB" in printed.out


def test_a_prediction_counts_the_table(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    MemoryWorkspaces(("tresnet_t",), path, batch_size=(4,)).run([])
    capsys.readouterr()

    def predicted(**options):
        MemoryPredict(model="tresnet_t", batch_size=4, json=True, **options).run([])
        return json.loads(capsys.readouterr().out)["allocated"]

    without, with_table = predicted(), predicted(workspaces=path)
    assert with_table["mib"] >= without["mib"]
    # measured, so nothing is left to a bound
    band, wider = (e["high_mib"] - e["mib"] for e in (with_table, without))
    assert band < wider / 4


def test_a_table_is_never_overwritten(measured, tmp_path):
    path = tmp_path / "table.json"
    path.write_text("precious")
    with pytest.raises(InputError, match="expected a new file to write, but"):
        MemoryWorkspaces(("tresnet_t",), path).run([])
    assert path.read_text() == "precious"
    assert measured == []


def test_a_table_that_appears_meanwhile_is_left_alone(measured, tmp_path, monkeypatch):
    path = tmp_path / "table.json"

    def late(*args):
        path.write_text("precious")
        return {}, {}

    monkeypatch.setattr("tresnet.memory.convolutions.measure_all", late)
    with pytest.raises(InputError, match="expected a new file to write, but"):
        MemoryWorkspaces(("tresnet_t",), path, batch_size=(2,)).run([])
    assert path.read_text() == "precious"


def test_a_failed_write_leaves_nothing(measured, tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        MemoryWorkspaces(("tresnet_t",), tmp_path / "table.json", batch_size=(2,)).run([])
    assert list(tmp_path.iterdir()) == []


def test_what_time_did_not_allow_is_said(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    command = MemoryWorkspaces(("tresnet_t",), path, batch_size=(2,), time_limit_s=0)
    assert command.run([]) == 1
    content = json.loads(path.read_text())
    assert content["workspaces"] == {}
    assert set(content["unmeasured"].values()) == {"no time was left"}
    assert "convolutions not measured" in capsys.readouterr().err


def test_the_matrix_means_its_training_steps(measured, tmp_path):
    path = tmp_path / "table.json"
    MemoryWorkspaces(("tresnet_t",), path, matrix=True).run([])
    keys = Workspaces.load(path).table
    assert {key.split()[1] for key in keys} == {"float32", "bfloat16"}
    assert {key.split()[3].split("x")[0] for key in keys} == {"64"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tresnet_t", "expected a file to write the table to: -o FILE.json"),
        ("-o {folder}/t.json", "expected models whose convolutions to measure, or --matrix"),
        ("tresnet_q -o {folder}/t.json", "unknown model 'tresnet_q'"),
        ("--matrix timm:resnet18 -o {folder}/t.json", "expected models of the matrix"),
        ("tresnet_t --batch-size 0 -o {folder}/t.json", "expected batch_size to be a whole number"),
    ],
)
def test_bad_input_is_explained(arguments, message, measured, tmp_path, capsys):
    argv = ["memory", "workspaces", *arguments.format(folder=tmp_path).split()]
    assert main(argv) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["memory", "workspaces", "tresnet_t", "-o", str(tmp_path / "t.json")]) == 2
    assert "error: expected a GPU to measure cuDNN's workspaces on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_none_is_refused(tmp_path, capsys):
    path = tmp_path / "table.json"
    assert main(["memory", "workspaces", "tresnet_t", "--device", "banana", "-o", str(path)]) == 2
    assert "error: expected a device such as cuda:0, got 'banana'" in capsys.readouterr().err
