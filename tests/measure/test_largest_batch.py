import pytest
import torch

from tresnet.errors import InputError
from tresnet.measure import largest_batch
from tresnet.measure.cases import BenchCase
from tresnet.measure.largest_batch import LargestSettings, find_edge, largest_batches
from tresnet.measure.read_records import COLUMNS


@pytest.mark.parametrize("edge", [0, 15, 16, 47, 64, 100, 128, 500, 1000, 1023, 1024, 1300, 9999])
@pytest.mark.parametrize("guess", [None, -1000, 100, 960, 1024, 1100, 4000])
@pytest.mark.parametrize("at_most", [None, 64, 128, 1008])
def test_the_edge_is_found(edge, guess, at_most):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= edge

    found = find_edge(fits, lambda: guess, first=64, grain=16, at_most=at_most)
    wanted = edge // 16 * 16
    assert found == (wanted if at_most is None else min(wanted, at_most))
    assert len(tried) == len(set(tried)) <= 24
    assert all(batch % 16 == 0 for batch in tried)
    assert at_most is None or max(tried) <= at_most


def test_a_good_guess_needs_few_steps():
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= 1010

    assert find_edge(fits, lambda: 1040, first=64, grain=16, at_most=None) == 1008
    assert len(tried) <= 5


def case(model="tresnet_t", **changes):
    return BenchCase(model, **{"input_size": 32, "dtype": "fp32", **changes})


def settings(**changes):
    return LargestSettings(
        **{"device": "cpu", "first": 2, "granularity": 2, "at_most": 6} | changes
    )


def test_real_steps_up_to_a_bound():
    lines = []
    ours, theirs = largest_batches(
        [case(input_size=None), case("timm:test_resnet")], settings(), lines.append
    )
    for row in (ours, theirs):
        assert (row.status, row.largest_batch, row.limited_by) == ("ok", 6, "at most 6")
        assert row.tries == [(2, True), (4, True), (6, True)]
        columns = row.to_dict()
        for column, kind in COLUMNS["bench_max_batch"].items():
            assert isinstance(columns[column], kind), column
    assert (ours.case.norm, ours.case.input_size) == ("abn", 32)
    assert lines[1] == "tresnet_t, batch 4, fp32, abn: fits"
    assert len(lines) == 6


def run_out_of_memory(monkeypatch, most, error):
    prepare = largest_batch.prepare

    def limited(case, *arguments):
        if case.batch_size > most:
            raise error
        return prepare(case, *arguments)

    monkeypatch.setattr(largest_batch, "prepare", limited)


def test_memory_ends_the_search(monkeypatch):
    run_out_of_memory(monkeypatch, 4, torch.OutOfMemoryError("CUDA out of memory"))
    (row,) = largest_batches([case()], settings(at_most=20), str)
    assert (row.status, row.largest_batch, row.limited_by) == ("ok", 4, "memory")


def test_time_ends_the_search(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(largest_batch.time, "perf_counter", lambda: float(next(clock)))
    (row,) = largest_batches([case()], settings(at_most=20, time_limit_s=2.0), str)
    assert row.tries == [(2, True), (4, True)]
    assert (row.status, row.largest_batch, row.limited_by) == ("ok", 4, "the time limit")
    (row,) = largest_batches([case()], settings(time_limit_s=0.5), str)
    assert (row.status, row.largest_batch, row.error) == (
        "out_of_time",
        None,
        "the time limit had passed",
    )


def test_not_even_one_batch(monkeypatch):
    run_out_of_memory(monkeypatch, 0, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    (row,) = largest_batches([case()], settings(), str)
    assert (row.status, row.largest_batch) == ("out_of_memory", None)
    assert row.error == "not even a batch of 2 fits"


def test_other_failures_are_not_taken_for_the_edge(monkeypatch):
    run_out_of_memory(monkeypatch, 2, RuntimeError("no kernel\nfor this"))
    broken, fine = largest_batches([case(), case()], settings(), str)
    assert (broken.status, broken.largest_batch, broken.error) == ("failed", None, "no kernel")
    assert len(broken.tries) == 2
    assert fine.status == "failed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 3}, "expected a first batch divisible by 2, got 3"),
        ({"granularity": 0}, "expected granularity of at least 1, got 0"),
        ({"at_most": 1}, "expected at_most of at least 2, got 1"),
        ({"at_most": None}, "expected at_most on cpu, got none: only a GPU says when it is full"),
        ({"time_limit_s": -1.0}, "expected a time limit above 0 s, got -1.0"),
        ({"time_limit_s": float("nan")}, "expected a time limit above 0 s, got nan"),
        ({"memory_limit_gib": 0.0}, "expected a memory limit above 0 GiB, got 0.0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(InputError, match=message):
        settings(**changes)


def test_no_model():
    with pytest.raises(InputError, match="at least one model"):
        largest_batches([], settings(), str)


@pytest.mark.gpu
def test_a_memory_limit_is_kept(cuda_device):
    chosen = LargestSettings("cuda", first=64, granularity=16, memory_limit_gib=1.0)
    (row,) = largest_batches([case()], chosen, str)
    assert row.limited_by == "memory"
    assert 0 < row.max_allocated_mib <= 1024
    (more,) = largest_batches([case()], LargestSettings("cuda", memory_limit_gib=2.0), str)
    assert more.largest_batch > row.largest_batch
