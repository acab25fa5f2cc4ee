"""Reads what runs wrote, to compare them."""

import json

import torch

VARYING = ("images_per_s", "data_wait_pct", "rss_peak_mib", "elapsed_s")


def rows_of(run_dir, phase="train"):
    """Rows of a phase, or of all, without what differs from run to run."""
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in VARYING}
        for row in rows
        if phase in (row["phase"], None)
    ]


def tensors_of(run_dir):
    """Weights, their average and the momenta in the last state."""
    content = torch.load(run_dir / "last.pt", weights_only=True)
    momenta = {
        f"momentum {i}": state["momentum_buffer"]
        for i, state in content["optimizer"]["state"].items()
    }
    average = {f"average {k}": v for k, v in (content["model_ema"] or {}).items()}
    return content["model"] | average | momenta


def assert_same_run(run_dir, other):
    """Both logged the same figures and ended with the same bits."""
    assert rows_of(run_dir, None) == rows_of(other, None)
    assert len((run_dir / "log.csv").read_text().splitlines()) == 1 + len(rows_of(other, None))
    expected = tensors_of(other)
    for name, tensor in tensors_of(run_dir).items():
        assert torch.equal(tensor, expected[name]), name
