"""Fixtures and hooks of all tests: fixed seeds, few threads, and skips without a GPU or weights."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tresnet import cores

cores.share()  # before the import of PyTorch

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton reads this variable when it is imported. Interpreted kernels run on a CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
MAX_THREADS = 4  # the tests' tensors are small: more threads cost more than they bring


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(min(torch.get_num_threads(), MAX_THREADS) // processes, 1))


def pytest_collection_finish() -> None:
    """Let the garbage collector skip the million objects that imports made, and run seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # 5 % of the tests' time


def pytest_unconfigure() -> None:
    """Let all objects be freed at the end, because C++ bindings print leaked objects."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if its GPU or its downloaded weights are missing."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for marker in item.iter_markers("weights"):
        missing = [name for name in marker.args if not (WEIGHTS / name).is_file()]
        if missing:
            pytest.skip(f"not downloaded: {', '.join(missing)} under {WEIGHTS}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape output that is not UTF-8, because pytest-xdist cannot send it between processes."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed PyTorch, so that a test's random numbers do not depend on the tests before it."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would also store a call stack, to seed CUDA later
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo what scripts that run in this process set in `os.environ`."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of digits, alone in its parent folder; writing it takes a second."""
    from tresnet.data import digits

    return digits.write(tmp_path_factory.mktemp("data"))


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give `datasets` and copies of buckets a temporary cache directory and no network."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return home
