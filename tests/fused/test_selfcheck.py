"""Kernels that are wrong, slow or cannot be launched are not used; right ones are remembered."""

import math
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet.ops import selfcheck
from tresnet.ops.abn import launch
from tresnet.ops.space_to_depth import launch as stem_launch


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def changed(module: Any, name: str, *changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that patches the module so that its launch returns something else."""
    original = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not isinstance(found, tuple):
            return changes[0](found)
        parts = zip(found, changes, strict=True)
        return tuple(part if part is None else change(part) for part, change in parts)

    return lambda patch: patch.setattr(module, name, run)


def same(x: Any) -> Any:
    return x


def files_in(cache):
    return sorted(path.suffix for path in (cache / "tresnet").iterdir())


def test_right_kernels_are_checked_once_and_remembered(cache, monkeypatch):
    monkeypatch.setattr(selfcheck, "check", lambda device: pytest.fail("in this process"))
    assert selfcheck.failure(torch.device(DEVICE)) is None
    assert files_in(cache) == ["", ".lock"]
    monkeypatch.setattr(selfcheck, "_command", lambda *_: pytest.fail("checked again"))
    assert selfcheck.failure(torch.device(DEVICE)) is None


WRONG = {
    "output": changed(launch, "apply", lambda y: y * 1.1, same),
    "bits": changed(launch, "apply", same, lambda bits: 255 - bits),
    "statistics": changed(launch, "statistics", lambda stats: stats * 1.1, same),
    "running statistics": changed(launch, "running_statistics", lambda y: y + 0.1),
    "squeeze": changed(launch, "squeeze", lambda y: y + 1),
    "gradient of x": changed(launch, "grad_apply", lambda y: y + 0.1),
    "masked gradient or input again": changed(launch, "grad_sums", same, lambda y: y + 0.1),
    "gradients of vectors": changed(launch, "merge_grad_sums", lambda y: y * 1.1),
    "values that are not written": changed(launch, "apply", lambda y: y * math.nan, same),
    "stem": changed(stem_launch, "stem_input", lambda y: y * 1.1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_found(what, monkeypatch):
    WRONG[what](monkeypatch)
    with pytest.raises(ArithmeticError, match="off by"):
        selfcheck.check(torch.device(DEVICE))


def test_a_fault_in_the_last_of_many_copies_is_found(monkeypatch):
    case = selfcheck._Case(
        torch.bfloat16, torch.channels_last, (2, 16, 6, 6), 1e-3, se=True, copies=3
    )

    def run():
        selfcheck._check_norm(case, torch.Generator().manual_seed(0), torch.device(DEVICE))

    run()
    original = launch.apply

    def overflowing(*args, **kwargs):
        y, bits = original(*args, **kwargs)
        y[-1] = y[0] + 1
        return y, bits

    monkeypatch.setattr(launch, "apply", overflowing)
    with pytest.raises(ArithmeticError, match=r"output, .*off by"):
        run()


def test_the_large_case_needs_64_bits_or_what_memory_there_is(monkeypatch):
    for free_gib, fraction in ((79, 1), (20, 0.3), (0.01, 0)):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _, free=free_gib: (int(free * 2**30), 80 * 2**30)
        )
        values = [math.prod(c.shape) * c.copies for c in selfcheck._large(torch.device("cuda"))]
        assert sum(values) / 2**31 >= fraction
        assert sum(values) * 2 * 10 <= free_gib * 2**30
    assert selfcheck._large(torch.device("cpu")) == []


def stand_in(monkeypatch, code, begins=True):
    """Let `code` run in place of the process that compares."""
    lines = ["import os, signal, sys, time", "say = lambda line: print(line, flush=True)"]
    lines += [f"say({selfcheck._SAYS + selfcheck._BEGINS!r})"] if begins else []
    text = "\n".join([*lines, code])
    monkeypatch.setattr(selfcheck, "_command", lambda *_: [sys.executable, "-c", text])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with SIGSEGV"),
        ("os._exit(3)", "ended with status 3"),
        ("say('terminate called')\nos.abort()", "ended with SIGABRT"),
        ("time.sleep(60)", "not finished after 2 s"),
        (f"say({selfcheck._SAYS + 'RuntimeError: Cannot find ptxas'!r})", "Cannot find ptxas"),
        # without the GPU or memory it says nothing about the kernels
        ("raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')", None),
        ("say('garbage')\nos.kill(os.getpid(), signal.SIGKILL)", None),
        ("sys.stdout.buffer.write(bytes(range(256)))", None),
        ("time.sleep(60)", None),
        (f"say({selfcheck._SAYS + selfcheck._NO_MEMORY!r})", None),
    ],
)
def test_ends_of_the_process_that_compares(code, reason, cache, monkeypatch):
    monkeypatch.setattr(selfcheck, "LIMIT_S", 2.0 if reason else 1.0)
    stand_in(monkeypatch, code, begins=reason is not None or selfcheck._NO_MEMORY in code)
    checked, device = [], torch.device(DEVICE)
    monkeypatch.setattr(selfcheck, "check", checked.append)
    if reason is None:  # this process checks itself
        assert selfcheck.failure(device) is None
        assert (checked, files_in(cache)) == ([device], ["", ".lock"])
        return
    with pytest.warns(UserWarning, match=rf"{reason}.*; impl='auto' runs plain PyTorch there"):
        assert reason in (selfcheck.failure(device) or "")
    assert (checked, files_in(cache)) == ([], [".lock"]), "asked again by the next process"


def test_the_process_itself_notes_missing_memory_and_hangs(cache, monkeypatch):
    def no_memory(device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(selfcheck, "_command", lambda *_: ["/no/such/python"])
    monkeypatch.setattr(selfcheck, "LIMIT_S", 0.2)
    for check, reason in (
        (no_memory, r"\(out of memory\)"),
        (lambda device: time.sleep(1), "not finished after 0 s"),
    ):
        monkeypatch.setattr(selfcheck, "check", check)
        with pytest.warns(UserWarning, match=reason):
            assert selfcheck.failure(torch.device(DEVICE))
    assert (cache / "tresnet").exists()


def test_another_gpu_than_the_one_meant_is_no_answer(capsys):
    with pytest.raises(SystemExit, match="expected the GPU of an H100, got another as cpu"):
        selfcheck.main(torch.device("cpu"), "an H100")
    assert selfcheck._SAYS not in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="expected a GPU that PyTorch can use, got cuda:99 "):
        selfcheck.main(torch.device("cuda:99"))


@pytest.mark.parametrize("verdict", ["right", "ValueError: no such instruction"])
def test_one_of_many_compares_and_those_that_wait_use_what_it_found(verdict, monkeypatch):
    """Ranks at once: a file's lock keeps threads apart as it does processes."""
    compared, together = [], threading.Barrier(4)

    def compare(device, key):
        compared.append(key)
        time.sleep(0.3)
        return verdict

    def rank(_):
        together.wait()
        return selfcheck.failure(torch.device(DEVICE))

    monkeypatch.setattr(selfcheck, "_found_by_child", compare)
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as ranks:
        warnings.simplefilter("ignore")
        found = list(ranks.map(rank, range(4)))
    assert len(compared) == 1
    for reason in found:
        assert reason is None if verdict == "right" else verdict in reason


def test_a_home_that_cannot_be_written_to_is_no_obstacle(cache, monkeypatch):
    (cache / "tresnet").write_text("a file where the folder would be")
    stand_in(monkeypatch, f"say({selfcheck._SAYS + selfcheck._RIGHT!r})")
    assert selfcheck.failure(torch.device(DEVICE)) is None
