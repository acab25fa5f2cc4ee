"""Test benchmarks/cudnn_fused.py: its convolutions are the model's, and errors are noticed."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cudnn_fused
from benchmarks.cudnn_fused import KEYS, SITES, Options, main
from tresnet.checkpoints.creation import create
from tresnet.fused import Runner
from tresnet.measure import runner
from tresnet.ops.epilogue import Epilogue, definition
from tresnet.surgery import fold


def test_convolutions_are_those_that_the_folded_model_launches(monkeypatch):
    found, arguments, conv2d = Counter(), [], torch.conv2d

    def note(y, after, *, shortcut=None, **_):
        x, weight, bias, stride, padding = arguments.pop()
        filters, channels, size, _ = weight.shape
        follows = "shortcut" if shortcut is not None else after.slope or "bias"
        if after.se is None and not after.blur:
            assert (bias, stride, padding) == (None, (1, 1), (size // 2, size // 2))
            assert after.gamma is None
            assert shortcut is None or after.slope is None
            found[size, channels, filters, 224 // x.shape[2], follows] += 1
        return definition.forward(y, after, shortcut=shortcut)

    ops = SimpleNamespace(forward=note, avg_pool=definition.avg_pool)
    monkeypatch.setattr(Runner, "ops", lambda *_: ops)
    monkeypatch.setattr(torch, "conv2d", lambda *args: arguments.append(args) or conv2d(*args))
    with torch.no_grad():
        fold(create("tresnet_m", device="meta").eval())(torch.empty(1, 3, 224, 224, device="meta"))
    assert found == {site: launches for launches, *site in SITES for site in [tuple(site)]}
    # as docs/kernels.md says
    assert (len(SITES), found.total()) == (13, 40)
    assert sum(count for count, *_, after in SITES if after == "shortcut") == 14
    assert sum(count for count, *_, after in SITES if after == "bias") == 3


def test_a_record_and_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.gc, "collect", int)  # a collection takes longer than the measurement
    monkeypatch.setattr(cudnn_fused, "SITES", [(3, 3, 64, 64, 4, 1e-3), (1, 1, 64, 128, 8, "bias")])
    small = {"device": "cpu", "batch_sizes": (2,), "dtypes": ("fp16",), "input_size": 32}
    assert main(Options(output_dir=tmp_path, **small)) == 0
    (path,) = tmp_path.glob("bench_cudnn_fused_cpu_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [tuple(row[key] for key in KEYS) for row in rows] == [
        (*site, 2, "fp16", "today") for site in cudnn_fused.SITES
    ]
    assert all(row["p50_us"] > 0 and 0 < row["error_ratio"] < 2 for row in rows)

    def with_relu(y, after, shortcut):
        slope = None if after.slope is None else 0.0  # instead of 1e-3
        return definition.forward(y, after._replace(slope=slope), shortcut=shortcut)

    wrong = SimpleNamespace(forward=with_relu, Epilogue=Epilogue)
    monkeypatch.setattr(cudnn_fused, "epilogue", wrong)
    assert main(Options(output_dir=tmp_path / "wrong", **small)) == 1
    (path,) = (tmp_path / "wrong").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert "times that of PyTorch" in rows[0]["error"]


def test_the_operator_takes_these_arguments():
    """A CPU has no such operator; wrong arguments would be a TypeError."""
    maps, weight, bias = torch.ones(1, 8, 2, 2), torch.ones(8, 8, 3, 3), torch.ones(8)
    with pytest.raises(NotImplementedError, match="'aten::cudnn_convolution_add_relu'"):
        cudnn_fused.by_torch(maps, weight, bias, maps)
