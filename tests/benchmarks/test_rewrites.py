"""benchmarks/rewrites.py: its counts are the documents' tables, and its peaks are known sums."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.rewrites import LivePeak, Options, compare, main, training_peak
from tresnet.measure.macs import without_computing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "three-linear-convolutions.md"
MIB = 2**20


def work() -> torch.Tensor:
    """Two MiB at once, then three, then one."""
    a = torch.zeros(MIB // 4)
    b = a + 1
    c = a + b
    del a, b
    return c.view(-1)


@pytest.mark.parametrize("computing", [True, False])
def test_the_peak_is_what_lived_at_once(computing):
    with contextlib.nullcontext() if computing else without_computing(), LivePeak() as peak:
        result = work()
        assert peak.peak_bytes == 3 * MIB
        assert peak.live_bytes == MIB
        del result
    assert peak.live_bytes == 0


def test_a_training_step_counts_weights_gradients_and_what_backward_keeps():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))

    unit = 256 * 256 * 4
    # weights 2, input 1, hidden 1, output 1 stay; at the end of backward: both weights' gradients,
    # and nothing else: the output's gradient is an expanded scalar made contiguous for a product
    peak = training_peak(build, (256, 256))
    assert 6 * unit <= peak <= 8 * unit + 4096


def test_a_comparison_is_printed_and_recorded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("benchmarks.rewrites.GROUPS", 2)
    monkeypatch.setattr("benchmarks.rewrites.CHANNELS", 8)
    options = Options("branches", batch_size=2, rounds=1, steps=1, output_dir=tmp_path)
    assert main(options) == 0
    header, loop, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["case", "parameters", "peak"]
    assert loop.startswith("loop ")
    assert len(list(tmp_path.glob("bench_branches_cpu_*.json"))) == 1


@pytest.mark.slow
def test_the_documents_tables_hold_what_is_counted():
    text = " ".join(PAGE.read_text().split())
    for row in compare(Options("convs")).rows:
        cells = (f"{row['parameters']:,}", f"{row['peak_mib']:.1f}", f"{row['macs'] / 1e9:.3f}")
        assert f"| {row['case']} | {' | '.join(cells)} |" in text
    loop, merged = compare(Options("branches")).rows
    assert f"need {loop['peak_mib']:.1f} MiB for a training step" in text
    assert f"in a loop and {merged['peak_mib']:.1f} MiB merged" in text
    assert {f"{row['macs'] / 1e9:.3f}" for row in (loop, merged)} == {"2.004"}
