import signal

import pytest
import torch

from tresnet.measure import largest_batch
from tresnet.measure.cases import BenchCase
from tresnet.measure.largest_batch import LargestContender, largest_batches
from tresnet.measure.runner import cudnn_benchmark
from tresnet.measure.settings import LargestSettings
from tresnet.settings.fields import replace

pytestmark = pytest.mark.usefixtures("quick")


def case(model="tresnet_t", **changes):
    return replace(BenchCase(model), **{"input_size": 32, **changes})


def settings(**changes):
    return LargestSettings(
        **{"device": "cpu", "first": 2, "granularity": 2, "at_most": 6} | changes
    )


class Counted(LargestContender):
    """Fits batches up to `edge`, or to `searched_edge` where cuDNN times its algorithms."""

    edge, searched_edge = 10, 6

    def _fits(self, batch):
        searches = torch.backends.cudnn.benchmark
        fits = batch <= (self.searched_edge if searches else self.edge)
        self.columns["tries"].append((batch, searches))
        self.columns["largest_batch"] = batch if fits else self.columns["largest_batch"]
        return fits


@pytest.mark.parametrize(
    ("limit_s", "by", "searched"), [(None, "memory", [10, 8, 6]), (6.0, "the time limit", [8, 6])]
)
def test_cudnn_searches_only_for_the_answer(monkeypatch, limit_s, by, searched):
    chosen = settings(device="cuda", at_most=None, case_limit_s=limit_s)
    contender = Counted(case(), chosen, torch.device("cuda"), None, str)
    tries = contender.columns["tries"]
    monkeypatch.setattr(largest_batch.time, "perf_counter", lambda: len(tries))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with cudnn_benchmark(False):
        contender.set_up()
    assert (contender.columns["largest_batch"], contender.columns["limited_by"]) == (6, by)
    assert [batch for batch, searches in tries if searches] == searched
    assert tries[-len(searched) :] == [(batch, True) for batch in searched]


@pytest.fixture
def search(tmp_path):
    """Search with these cases and settings, and return the rows."""

    def searched(*cases, log=str, **changes):
        chosen = settings(**{"output_dir": tmp_path, **changes})
        return largest_batches(cases, chosen, log).rows

    return searched


def test_real_steps_up_to_a_bound(search):
    lines = []
    cases = case(input_size=None), case("timm:test_resnet", channels_last=True)
    rows = search(*cases, at_most=7, log=lines.append)
    for row in rows:
        assert (row["status"], row["largest_batch"], row["limited_by"]) == ("ok", 6, "at most 6")
        assert row["tries"] == [(2, True), (4, True), (6, True)]
    assert (rows[0]["norm"], rows[0]["input_size"]) == ("abn", 32)
    assert "tresnet_t, batch 4, fp32: fits" in lines


def stub(monkeypatch, step):
    """Steps of batches that do this instead: `step(batch)`."""

    def prepare(case, *arguments):
        return (lambda: step(case.batch_size) or torch.zeros(())), None, 32

    monkeypatch.setattr(largest_batch, "prepare", prepare)


def failing_above(most, error):
    def step(batch):
        if batch > most:
            raise error

    return step


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("most", "error", "expected"),
    [
        (4, OUT_OF_MEMORY, ("ok", 4, "memory", None)),
        (
            *(0, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
            ("out_of_memory", None, None, "not even a batch of 2 fits"),
        ),
        (2, RuntimeError("no kernel\nfor this"), ("failed", 2, None, "no kernel")),
    ],
)
def test_memory_ends_the_search_and_nothing_else_is_taken_for_it(
    monkeypatch, search, most, error, expected
):
    stub(monkeypatch, failing_above(most, error))
    (row,) = search(case(), at_most=20)
    names = "status", "largest_batch", "limited_by", "error"
    assert tuple(row[name] for name in names) == expected


@pytest.mark.parametrize("limits", [(20.0, None), (40.0, 10.0)])
def test_time_ends_the_search_of_each_case(monkeypatch, search, limits):
    now = [0.0]
    monkeypatch.setattr(largest_batch.time, "perf_counter", lambda: now[0])
    stub(monkeypatch, lambda batch: now.__setitem__(0, now[0] + 2.0))  # 4 s a try
    limits = dict(zip(("time_limit_s", "case_limit_s"), limits, strict=True))
    # 7.5 s of the 10 s that are its share
    for row in search(case(), case("timm:test_resnet"), at_most=20, **limits):
        assert row["tries"] == [(2, True), (4, True)]
        assert (row["status"], row["largest_batch"]) == ("ok", 4)
        assert row["limited_by"] == "the time limit"


def test_time_may_end_before_the_smallest_batch_is_tried(monkeypatch, search):
    now = [0.0]
    monkeypatch.setattr(largest_batch.time, "perf_counter", lambda: now[0])

    def step(batch):
        now[0] += 8.0
        raise OUT_OF_MEMORY

    stub(monkeypatch, step)
    (row,) = search(case(), first=4, case_limit_s=10.0)
    assert (row["status"], row["tries"]) == ("out_of_time", [(4, False)])
    assert row["error"] == "no batch fitted within the time limit"


def test_a_search_that_is_stopped_keeps_its_largest_batch(monkeypatch, search):
    stub(monkeypatch, lambda batch: None)

    def stopping(line):
        if line.startswith("timm:test_resnet, batch 4"):
            signal.raise_signal(signal.SIGTERM)

    rows = search(case(), case("timm:test_resnet"), log=stopping)
    assert [row["status"] for row in rows] == ["ok", "interrupted"]
    assert [row["largest_batch"] for row in rows] == [6, 4]


@pytest.mark.gpu
def test_a_memory_limit_is_kept(tmp_path, cuda_device):
    def largest(memory):
        chosen = LargestSettings(device="cuda", gpu_memory=memory, output_dir=tmp_path)
        return largest_batches([case()], chosen, str).rows[0]

    row = largest("1GiB")
    assert row["limited_by"] == "memory"
    assert 0 < row["max_allocated_mib"] <= 1024
    assert largest("2GiB")["largest_batch"] > row["largest_batch"]
