"""Whether a batch fits, and the largest that does, against predictions of single batches."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.toys import mean
from tresnet.errors import InputError
from tresnet.memory import Device, Fits, capacity, max_batch, predict
from tresnet.memory.capacity import fits, interpolated
from tresnet.memory.device import GENERIC, MIB
from tresnet.memory.plan import MemoryPlan, make_plan, plan_of
from tresnet.memory.prediction import record
from tresnet.memory.replay import peak_live_bytes, replay

SMALL_GPU = Device(
    "small",
    capacity_bytes=240 * MIB,
    cublas_workspace_bytes=0,
    context_low_bytes=40 * MIB,
    context_bytes=50 * MIB,
    context_high_bytes=60 * MIB,
)


class Wide(nn.Module):
    """Module whose two layers without convolutions take 1 MiB per image each.

    From each batch size in `edges` on, it runs one more operation, as some models do when larger
    batches need padding.
    """

    def __init__(self, *edges):
        super().__init__()
        self.scale, self.edges = nn.Parameter(torch.ones(1)), edges

    def forward(self, x):
        y = (x * self.scale).exp()
        for _ in filter(len(x).__ge__, self.edges):
            y = y + 1
        return y


STEP = {"input_size": (1, 512, 512), "loss": mean}


def trace(name, batch_size, **step):
    _, model, plan = make_plan(name, plan_of("predict", batch_size, step))
    return record(model, plan, GENERIC)


@pytest.mark.parametrize(
    "step", [{"impl": "plain", "opt": "adamw", "ema_decay": 0.9}, {"train": False}]
)
def test_traces_of_other_batches_are_computed(step):
    """Partial sums of kernels in training, some kB, are no linear function of the batch size."""
    two, four, real = (trace("tresnet_t", n, layers=(1, 1, 1, 1), **step) for n in (2, 4, 24))
    assert trace("tresnet_t", 2, layers=(1, 1, 1, 1), **step).operations == two.operations
    computed = interpolated((2, two), (4, four), 24)
    assert computed.events == real.events
    assert [b.n_bytes for b in computed.buffers] == [b.n_bytes for b in real.buffers]
    highest = [[o.workspace_high_bytes for o in one.operations] for one in (computed, real)]
    assert highest[0] == highest[1]


def test_models_that_change_with_the_batch_are_refused():
    with pytest.raises(InputError, match="the same operations at every batch size"):
        interpolated((2, trace("tresnet_t", 2)), (4, trace("timm:resnet18", 4, input_size=64)), 8)


def test_a_model_that_changes_below_its_largest_batch_takes_few_traces(monkeypatch):
    traced = []
    monkeypatch.setattr(capacity, "record", lambda *args: traced.append(args) or record(*args))
    large = dataclasses.replace(SMALL_GPU, capacity_bytes=2400 * MIB)
    assert max_batch(Wide(20), device=large, **STEP).batch_size > 200
    assert len(traced) <= 12  # 28 without a second pair of batches


@pytest.mark.parametrize("edges", [(), (3,), (3, 20)])
def test_largest_batch_agrees_with_every_batch_predicted(edges):
    most = max_batch(Wide(*edges), device=SMALL_GPU, **STEP)
    answers = {
        n: fits(predict(Wide(*edges), batch_size=n, **STEP).trace, SMALL_GPU)
        for n in range(1, most.no_from + 3)
    }
    assert {n: most.answer(n) for n in answers} == answers
    assert f"fits: batch {most.batch_size}" in str(most)
    assert f"does not fit: from {most.no_from} on" in str(most)
    assert answers[most.batch_size] is Fits.YES
    assert answers[most.no_from] is Fits.NO
    # x, x * scale, exp, and in backward two gradients more: five MiB an image at the most.
    assert (240 - 60) / 7 < most.batch_size < (240 - 40) / 3


def test_a_model_that_fails_is_not_traced_again(monkeypatch):
    sizes = []

    def fail(model, plan, device):
        sizes.append(plan.batch_size)
        raise InputError("wrong")

    monkeypatch.setattr(capacity, "record", fail)
    with pytest.raises(InputError, match="wrong"):
        max_batch(Wide, device=SMALL_GPU, **STEP)
    assert sizes == [16]


def test_a_step_whose_tensors_alone_are_too_large_surely_does_not_fit():
    traced = trace("tresnet_t", 4)
    assert 0 < peak_live_bytes(traced) <= replay(traced).peak_allocated_bytes
    least = int(0.99 * peak_live_bytes(traced)) + GENERIC.context_low_bytes
    for capacity_bytes, answer in ((least - 1, Fits.NO), (least + 1, Fits.UNCERTAIN)):
        assert fits(traced, dataclasses.replace(GENERIC, capacity_bytes=capacity_bytes)) is answer


PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
TABLE = re.findall(r"(?m)^\| (tresnet_\w+) \| ([\d ()|]+) \|$", PAGE)
assert TABLE, PAGE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), TABLE, ids=[name for name, _ in TABLE])
def test_the_pages_table_of_largest_batches_is_what_is_predicted(name, cells, monkeypatch):
    traces = {}  # by batch, because they are alike on GPUs that differ in their memory

    def recorded(module, plan, device):
        if plan.batch_size not in traces:
            traces[plan.batch_size] = record(module, plan, device)
        return traces[plan.batch_size]

    monkeypatch.setattr(capacity, "record", recorded)
    columns = [*zip(("12GiB", "16GiB", "24GiB", "40GiB", "80GiB"), cells.split(" | "), strict=True)]
    if name != "tresnet_m":  # a column for each other model: what changes one, changes the others
        row = [other for other, _ in TABLE].index(name)
        columns = columns[row % 5 : row % 5 + 1]
    for memory, cell in columns:
        found = max_batch(name, amp="bf16", gpu_memory=memory)
        assert f"{found.batch_size} ({found.no_from})" == cell, memory


@pytest.mark.slow
def test_an_evaluation_is_predicted_where_batches_of_16_and_32_differ():
    # at 192 pixels, tresnet_l pads its channels from batch 20 on
    plan = MemoryPlan(batch_size=1, train=False, input="uint8", input_size=192, device="h100")
    found = capacity._bytes_of("tresnet_l", plan)
    expected = predict("tresnet_l", batch_size=300, train=False, input="uint8", input_size=192,
                       device="h100")  # fmt: skip
    assert 0 < found(300) <= expected.allocated.high_bytes
