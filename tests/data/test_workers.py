"""Workers under every start method: their batches, memory, signals and deaths."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.forks import run_forked
from tests.hf import private_bytes
from tresnet.cli import shell
from tresnet.data import loaders, workers
from tresnet.data.loaders import Loader
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler, train_sampler
from tresnet.errors import DataError
from tresnet.settings import Augment, EvalTransform

EVAL = eval_sampler(EvalTransform(input_size=8, crop_mode="squash"))
CPU = torch.device("cpu")
PRIVILEGED = 77
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses /proc and all start methods")


@pytest.fixture(params=["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def start(request):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    """Let PyTorch also notice dead workers of another process than this one at once."""
    monkeypatch.setattr(loaders, "usable_cores", lambda: 2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.fixture
def dataset(folder):
    return open_split(folder, "train", EVAL)


def test_crops_arrive_through_shared_memory(dataset, start, monkeypatch):
    policy = Augment(auto_augment="original", cutout_prob=0.5, affine_degrees=9.0)
    dataset.transform = train_sampler(policy, 16)
    expected, ranges = list(Loader(dataset, 4, training=True)), []
    tensors = loaders._LoadedBatch.tensors

    def recorded(batch, memory, pin):
        ranges.append(batch.pixels)
        return tensors(batch, memory, pin)

    monkeypatch.setattr(loaders._LoadedBatch, "tensors", recorded)
    loader = Loader(dataset, 4, training=True, workers=2)
    for (crops, labels), (plain, same) in zip(loader, expected, strict=True):
        assert torch.equal(crops.render(CPU), plain.render(CPU))
        assert torch.equal(labels, same)
    assert len({begin for begin, _ in ranges}) == 6  # three slots for each worker
    loader.close()


class Killing:
    """A transform that kills its process at one image."""

    def __init__(self, data):
        self.data = data

    def __call__(self, image):
        if image.data == self.data:
            os.kill(os.getpid(), signal.SIGKILL)
        return EVAL(image)


@pytest.mark.parametrize("doomed", [2, 9])
def test_a_worker_that_dies_is_an_error_that_says_so(dataset, start, workers_now, doomed):
    dataset.transform = Killing(dataset.encoded_image(doomed).data)
    loader = Loader(dataset, 2, training=False, workers=2)
    with pytest.raises(DataError, match=r"has died \(DataLoader worker .* use fewer --workers"):
        list(loader)
    loader.close()
    assert not workers_now()


def test_a_daemonic_process_is_told_that_it_starts_no_workers(dataset, monkeypatch):
    """Those of a multiprocessing.Pool or of Celery are daemonic (pytorch 15950)."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(DataError, match=r"daemonic process, .* use --workers 0"):
        list(Loader(dataset, 2, training=False, workers=1))
    assert len(list(Loader(dataset, 2, training=False, workers=0))) == 13


def test_workers_that_die_between_epochs_are_an_error_that_says_so(dataset, start, workers_now):
    loader = Loader(dataset, 2, training=False, workers=2)
    list(loader)
    for worker in workers_now():
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"has died \(DataLoader worker .* use fewer --workers"):
        list(loader)
    loader.close()


def test_ctrl_c_is_the_main_processs_to_handle(dataset, start, workers_now):
    loader = Loader(dataset, 2, training=False, workers=2)
    batches = iter(loader)
    seen = [label for _ in range(2) for label in next(batches)[1].tolist()]  # both workers are up
    for worker in workers_now():
        os.kill(worker.pid, signal.SIGINT)
    for _, labels in batches:
        seen += labels.tolist()
    assert seen == dataset.targets.tolist()
    loader.close()


def signal_group(dataset, start):
    """Load while the process group gets signals, as by torchrun or Ctrl-C, at any moment."""
    os.setsid()
    loaders.usable_cores = lambda: 2
    for number in workers.STOPPING:
        signal.signal(number, lambda *_: None)
    multiprocessing.set_start_method(start, force=True)
    loader = Loader(dataset, 2, training=False, workers=2)
    os.killpg(0, signal.SIGTERM)  # while the server imports
    batches = iter(loader)
    seen = 0
    for number in reversed(workers.STOPPING):
        seen += len(next(batches)[0])
        os.killpg(0, number)
        time.sleep(0.2)
    pids = [child.pid for child in multiprocessing.active_children()]
    seen += sum(len(labels) for _, labels in batches)
    sys.stdout.write(f"{seen} {pids}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_outlive_signals_to_the_group_but_not_the_main_process(dataset, start, tmp_path):
    ended = run_forked(signal_group, dataset, start, folder=tmp_path)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    seen, _, pids = ended.stdout.partition(" ")
    assert seen == "26", ended.stderr
    processes = [Path(f"/proc/{pid}") for pid in eval(pids)]
    assert len(processes) == 2
    deadline = time.monotonic() + 10
    while any(process.exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Large:
    """A data set of which each item reads all arrays and tensors."""

    def __init__(self, length):
        self.array, self.tensor = np.ones(length), torch.ones(length, dtype=torch.float64)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return EVAL(Image.new("RGB", (8, 8))), int(self.array.sum() + self.tensor.sum())


def test_workers_map_the_arrays_of_a_data_set(start, workers_now):
    """80 MB of arrays add less than 8 MB to a worker."""
    private = []
    for length in (1, 5_000_000):
        loader = Loader(Large(length), 4, training=False, workers=1)
        assert [labels.tolist() for _, labels in loader] == [[2 * length] * 4] * 2
        (worker,) = workers_now()
        private.append(private_bytes(worker.pid))
        loader.close()
    assert private[1] - private[0] < 8e6


def test_shared_memory_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    memory = workers.SharedMemory(1 << 20)
    memory.view(10, 13)[:] = 1, 2, 3
    assert memory.view(9, 14).tolist() == [0, 1, 2, 3, 0]


def load_beside_a_full_shm(dataset, start, size):
    """Load while /dev/shm, of this process and its children alone, is a disk of that size."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, recursive = 1 << 18, 1 << 14
    if libc.unshare(0x20000) or libc.mount(None, b"/", None, private | recursive, None):
        sys.exit(PRIVILEGED)
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) == 0
    multiprocessing.set_start_method(start, force=True)

    def load():
        loader = Loader(dataset, 2, training=False, workers=2)
        sys.stdout.write(str(sum(len(labels) for _, labels in loader)))
        return 0

    sys.exit(shell.run(load))


@pytest.mark.parametrize(("size", "code", "words"), [("1m", 0, "26"), ("4k", 2, "--shm-size")])
def test_shm_holds_semaphores_alone_and_is_named_where_it_is_full(
    dataset, start, tmp_path, size, code, words
):
    ended = run_forked(load_beside_a_full_shm, dataset, start, size, folder=tmp_path)
    if ended.returncode == PRIVILEGED:
        pytest.skip("only root mounts a disk")
    assert (ended.returncode, words in ended.stdout + ended.stderr) == (code, True), ended.stderr
