"""benchmarks/scaling.py: its layers are the model's, and its limits are those of arithmetic."""

import json
from pathlib import Path

import pytest

from benchmarks.scaling import exposed_ms, gradients, main

ZOO = Path(__file__).parents[1] / "golden" / "zoo.json"
PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_gradients_wait_for_what_bandwidth_and_backward_leave():
    golden = json.loads(ZOO.read_text())["tresnet_m"]
    layers = gradients("tresnet_m", golden["pixels"])
    size, macs = map(sum, zip(*layers, strict=True))
    assert size == 4 * golden["parameters"]
    assert macs == pytest.approx(golden["macs"], rel=0.01)
    assert exposed_ms(layers, 40.0, 8, 1e9, 0.0) == pytest.approx(0, abs=1e-6)
    total_ms = 2 * 7 / 8 * size / 20e9 * 1e3
    assert exposed_ms(layers, 0.0, 8, 20.0, 0.0) == pytest.approx(total_ms)
    assert 0 < exposed_ms(layers, 40.0, 8, 20.0, 0.0) < total_ms


def test_the_page_has_the_table_that_its_command_prints(monkeypatch, capsys):
    command = "python benchmarks/scaling.py --step-ms 60 --batch-size 128"
    assert command in PAGE.read_text()
    monkeypatch.setattr("sys.argv", command.split()[1:])
    main()
    assert capsys.readouterr().out in PAGE.read_text()
