"""Kernels that are wrong, slow or cannot be launched are not used; right ones are remembered."""

import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.ops.kernels import DEVICE
from tresnet.fused import compare, selfcheck
from tresnet.layers.conv_norm_act import ConvNormAct

GPU = torch.device(DEVICE)
SUBJECT = compare.describe(
    [("conv1", ConvNormAct(3, 8, 3))], torch.empty(1, 3, 2, 2), torch.float32
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def failure():
    """Return what a process finds that has not asked before."""
    selfcheck._failures.clear()
    return selfcheck.failure(GPU, SUBJECT)


def files_in(cache):
    return sorted(path.suffix for path in (cache / "tresnet").iterdir())


def test_right_kernels_are_checked_once_and_remembered(cache, monkeypatch):
    """The child process compares this subject's real kernels."""
    monkeypatch.setattr(selfcheck, "compare", lambda *_: pytest.fail("in this process"))
    assert failure() is None
    assert files_in(cache) == ["", ".lock"]
    monkeypatch.setattr(selfcheck, "_command", lambda *_: pytest.fail("checked again"))
    assert failure() is None


def stand_in(monkeypatch, code, begins=True):
    """Run `code` in place of the child process that checks the kernels."""
    lines = ["import os, signal, sys, time", "say = lambda line: print(line, flush=True)"]
    lines += [f"say({selfcheck._PREFIX + selfcheck._BEGINS!r})"] if begins else []
    text = "\n".join([*lines, code])
    monkeypatch.setattr(selfcheck, "_command", lambda *_: [sys.executable, "-c", text])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with SIGSEGV"),
        ("os._exit(3)", "ended with status 3"),
        ("say('terminate called')\nos.abort()", "ended with SIGABRT"),
        ("time.sleep(60)", "not finished after 2 s"),
        (f"say({selfcheck._PREFIX + 'RuntimeError: Cannot find ptxas'!r})", "Cannot find ptxas"),
        # without the GPU or memory it says nothing about the kernels
        ("raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')", None),
        ("say('garbage')\nos.kill(os.getpid(), signal.SIGKILL)", None),
        ("sys.stdout.buffer.write(bytes(range(256)))", None),
        ("time.sleep(60)", None),
        (f"say({selfcheck._PREFIX + selfcheck._NO_MEMORY!r})", None),
    ],
)
def test_ends_of_the_process_that_compares(code, reason, cache, monkeypatch):
    monkeypatch.setattr(selfcheck, "LIMIT_S", 2.0 if reason else 1.0)
    stand_in(monkeypatch, code, begins=reason is not None or selfcheck._NO_MEMORY in code)
    compared = []
    monkeypatch.setattr(selfcheck, "compare", lambda *args: compared.append(args))
    if reason is None:  # this process checks itself
        assert failure() is None
        assert (compared, files_in(cache)) == ([(SUBJECT, GPU)], ["", ".lock"])
        return
    with pytest.warns(UserWarning, match=rf"{reason}.*; impl='auto' runs plain modules there"):
        assert reason in (failure() or "")
    assert (compared, files_in(cache)) == ([], [".lock"]), "asked again by the next process"


def test_the_process_itself_notes_missing_memory_and_hangs(cache, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(selfcheck, "_command", lambda *_: ["/no/such/python"])
    monkeypatch.setattr(selfcheck, "LIMIT_S", 0.2)
    for compared, reason in (
        (no_memory, r"\(out of memory\)"),
        (lambda *_: time.sleep(1), "not finished after 0 s"),
    ):
        monkeypatch.setattr(selfcheck, "compare", compared)
        with pytest.warns(UserWarning, match=reason):
            assert failure()
    assert files_in(cache) == [".lock"]


def test_a_check_by_hand_records_success_and_a_failure_does_not(cache, monkeypatch, capsys):
    def wrong(*_):
        raise ArithmeticError("apply: off by 1")

    monkeypatch.setattr(selfcheck, "compare", wrong)
    assert selfcheck.main(GPU, SUBJECT) == 1
    assert not (cache / "tresnet").exists()
    monkeypatch.setattr(selfcheck, "compare", lambda *_: None)
    assert selfcheck.main(GPU, SUBJECT) == 0
    assert files_in(cache) == [""]
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.removeprefix(selfcheck._PREFIX) for line in said] == [
        "has the GPU", "ArithmeticError: apply: off by 1", "has the GPU", "right"
    ]  # fmt: skip
    monkeypatch.setattr(selfcheck, "_command", lambda *_: pytest.fail("checked again"))
    assert failure() is None


def test_another_gpu_than_the_one_meant_is_no_answer(capsys):
    with pytest.raises(SystemExit, match=f"GPU of an H100, got another GPU as {DEVICE}"):
        selfcheck.main(GPU, SUBJECT, "an H100")
    assert selfcheck._PREFIX not in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="expected a GPU that PyTorch can use, got cuda:99 "):
        selfcheck.main(torch.device("cuda:99"), SUBJECT)


@pytest.mark.parametrize("verdict", ["right", "ValueError: no such instruction"])
def test_one_of_many_compares_and_those_that_wait_use_what_it_found(verdict, monkeypatch):
    """Ranks at once: a file's lock keeps threads apart as it does processes."""
    compared, together = [], threading.Barrier(4)

    def compare_slowly(device, subject):
        compared.append(subject)
        time.sleep(0.3)
        return verdict

    def rank(_):
        together.wait()
        return failure()

    monkeypatch.setattr(selfcheck, "_verdict_of_child", compare_slowly)
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as ranks:
        warnings.simplefilter("ignore")
        reasons = list(ranks.map(rank, range(4)))
    assert len(compared) == 1
    for reason in reasons:
        assert reason is None if verdict == "right" else verdict in reason


def test_a_home_that_cannot_be_written_to_is_no_obstacle(cache, monkeypatch):
    (cache / "tresnet").write_text("a file where the folder would be")
    stand_in(monkeypatch, f"say({selfcheck._PREFIX + selfcheck._RIGHT!r})")
    assert failure() is None


def test_without_a_home_success_is_recorded_among_temporary_files(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    record = selfcheck.success_file(GPU, SUBJECT)
    assert record.parent == Path(tempfile.gettempdir()) / "tresnet"


def test_a_check_by_hand_begins_without_a_warning():
    command = [sys.executable, "-W", "error", "-m", selfcheck.__name__, "cpu", "no_model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "InputError: unknown model 'no_model'" in done.stderr
