"""Fixtures of every test: a fixed seed, few threads, and skips for missing devices."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides at its import whether its kernels are interpreted, so that a CPU runs them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
MAX_THREADS = 4  # the tests' tensors are small: more threads cost more than they bring


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs behind them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(min(torch.get_num_threads(), MAX_THREADS) // processes, 1))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the million objects that imports made and that stay."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let them be freed after all: bindings in C++ print what is left at the end."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, saying what it lacks."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for marker in item.iter_markers("weights"):
        missing = [name for name in marker.args if not (WEIGHTS / name).is_file()]
        if missing:
            pytest.skip(f"not downloaded: {', '.join(missing)} under {WEIGHTS}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the processes of xdist hand on what was printed of names that are not UTF-8."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make each test's random numbers the same alone, in a full run and in any order."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # this alone: torch would note the whole call stack, for a GPU that is not there
        torch.default_generator.manual_seed(0)


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `datasets` and copies of buckets use a directory of the test's own, and no network."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return home
