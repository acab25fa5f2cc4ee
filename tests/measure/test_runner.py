"""A run's order, and what it keeps when a contender raises, hangs, or the process is killed."""

import signal
import time

import pytest
import torch

from tresnet.errors import InputError, MissingDependencyError
from tresnet.measure import runner
from tresnet.measure.runner import Contender, NoResultError, run
from tresnet.measure.settings import RunSettings

pytestmark = pytest.mark.usefixtures("quick")


class Fake(Contender):
    """Notes what is done with it, and does what it is told to at one of its visits (0: set-up)."""

    def __init__(self, name, events, at=None, do=None, units=1.0):
        self.label, self.events, self.at, self.do, self.units = name, events, at, do, units
        self.columns, self.visits = {"case": name}, 0

    def step(self, number):
        self.events.append(f"{self.label}{number}")
        if number == self.at:
            self.do()

    def set_up(self):
        self.step(0)

    def visit(self):
        self.visits += 1
        self.step(self.visits)
        return [0.5, 0.25, 0.25]

    def figures(self, rounds):
        return {"rounds": len(rounds)}

    def close(self):
        self.events.append(f"{self.label} closed")


def raising(error):
    def fail():
        raise error

    return fail


class Saved(list):
    """A record that keeps every state it was written in."""

    path, write = None, list.append


def measured(groups, record=None, **settings):
    rounds = settings.pop("rounds", 3)
    return run(groups, RunSettings(**settings), rounds=rounds, log=str, record=record)


def test_each_is_timed_right_after_its_set_up_and_then_in_turns():
    events, saved = [], Saved()
    outcome = measured([[Fake("a", events, units=2.0), Fake("b", events)]], saved)
    assert events[:8] == ["a0", "a1", "b0", "b1", "b2", "a2", "a3", "b3"]
    assert [(row["case"], row["status"], row["rounds"]) for row in outcome.rows] == [
        ("a", "ok", 3),
        ("b", "ok", 3),
    ]
    assert [row["ratio_to_first"] for row in outcome.rows] == [1.0, 0.5]
    assert outcome.complete
    assert outcome.labels == ["a", "b"]
    # when b begins, after it, and after each further round
    assert [[row["status"] for row in rows] for rows in saved[:2]] == [
        ["ok", "not_begun"],
        ["ok", "begun"],
    ]
    assert [rows[0]["rounds"] for rows in saved] == [1, 1, 1, 2, 3]


def test_every_compiled_case_may_be_compiled():
    limits = []
    case = Fake("a", [], 0, lambda: limits.append(torch._dynamo.config.recompile_limit))
    run([[case]], RunSettings(), rounds=1, log=str, compiles=True)
    assert limits == [runner._RECOMPILE_LIMIT]


def test_a_group_is_closed_before_the_next_is_begun():
    events = []
    outcome = measured([[Fake("a", events)], [Fake("b", events)]], rounds=1)
    assert events[:5] == ["a0", "a1", "a closed", "b0", "b1"]
    assert [row["ratio_to_first"] for row in outcome.rows] == [None, None]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RuntimeError("no such kernel\nsecond line"), "failed", "no such kernel"),
        (KeyError("ours"), "failed", "KeyError: 'ours'"),
        (InputError("expected b, got a"), "failed", "InputError: expected b, got a"),
        (AssertionError(), "failed", "AssertionError"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", "CUDA out of memory"),
        (MissingDependencyError("pip install it"), "left_out", "pip install it"),
        (NoResultError("wrong", "too far off"), "wrong", "too far off"),
    ],
)
def test_whatever_a_contender_raises_costs_the_others_nothing(at, error, status, text):
    events, saved = [], Saved()
    group = [Fake("a", events), Fake("b", events, at, raising(error)), Fake("c", events)]
    outcome = measured([group], saved)
    assert [(row["status"], row["rounds"]) for row in outcome.rows] == [
        ("ok", 3),
        (status, max(at - 1, 0)),  # what was timed before stays
        ("ok", 3),
    ]
    failed = saved[-1][1]
    assert failed["error"] == text
    assert bool(failed["trace"]) == (status in ("failed", "out_of_memory"))
    assert (str(error).splitlines() or [""])[-1] in " ".join(failed["trace"][-1:] or [str(error)])
    assert outcome.complete == (status == "left_out")
    assert "b closed" in events


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_contender_that_hangs_is_stopped_at_the_limit():
    events, began_s = [], time.perf_counter()
    hanging = Fake("b", events, 0, lambda: time.sleep(60))
    group = [Fake("a", events), hanging, Fake("c", events)]
    outcome = measured([group], time_limit_s=0.5)
    assert [row["status"] for row in outcome.rows] == ["ok", "out_of_time", "out_of_time"]
    assert [row["rounds"] for row in outcome.rows] == [1, 0, 0]
    assert "near" in outcome.rows[2]["error"]
    hanging = Fake("b", events, 2, lambda: time.sleep(60))
    outcome = measured([[Fake("a", events), hanging, Fake("c", events)]], case_limit_s=0.3)
    assert [row["status"] for row in outcome.rows] == ["ok"] * 3
    assert [row["rounds"] for row in outcome.rows] == [3, 1, 3]
    assert outcome.rows[1]["error"] == "stopped at the time limit"
    assert time.perf_counter() - began_s < 10


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_signal_ends_the_run_with_what_is_measured(number, at):
    saved, before = Saved(), [signal.getsignal(one) for one in SIGNALS]
    stopped = Fake("b", [], at, lambda: signal.raise_signal(number))
    outcome = measured([[Fake("a", []), stopped], [Fake("c", [])]], saved)
    assert outcome.interrupted
    assert [row["status"] for row in outcome.rows] == [
        "ok",
        "ok" if at > 1 else "interrupted",
        "interrupted",
    ]
    assert saved[-1] == outcome.rows
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_without_anything_measured_an_interrupt_leaves_no_record():
    saved = Saved()
    with pytest.raises(KeyboardInterrupt):
        measured([[Fake("a", [], 1, raising(KeyboardInterrupt()))]], saved)
    assert saved == []


def test_the_search_for_algorithms_is_put_back():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    with runner.timing_on(torch.device("cpu")):
        assert (cudnn.benchmark, cudnn.benchmark_limit) == (True, 0)
        with runner.cudnn_benchmark(False):
            assert cudnn.benchmark is False
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before
