import mmap
import sys
import types

import pytest
import torch

from tresnet import env
from tresnet.measure import memory_meter
from tresnet.measure.memory_meter import MemoryMeter, MemorySnapshot

MIB = 2**20


def test_columns_are_in_mib_and_none_is_not_zero():
    snapshot = MemorySnapshot(int(97.8 * MIB), 604 * MIB, int(530.9 * MIB), None)
    assert snapshot.to_dict()["reserved_mib"] == 604.0
    assert snapshot.format() == "allocated 97.8 MiB, reserved 604.0 MiB, max allocated 530.9 MiB"
    assert MemorySnapshot(allocated=0).format() == "allocated 0.0 MiB"
    assert MemorySnapshot().format() == "memory unknown"
    assert MemorySnapshot(max_allocated=MIB, device_used=9).peak_mib == 1.0
    assert MemorySnapshot(rss_peak=2 * MIB).peak_mib == 2.0


def test_phases_are_stored_in_order():
    meter = MemoryMeter("cpu")
    for name in ("initial", "model", "train", "train", "final"):
        meter.phase(name)
    assert list(meter.phases) == ["initial", "model", "train", "final"]
    columns = meter.phases["final"].to_dict()
    assert columns.pop("rss_peak_mib") > 20  # the interpreter alone is larger
    assert set(columns.values()) == {None}  # a CPU has no other


def touched_pages() -> mmap.mmap:
    """128 MiB fresh from the kernel: an allocator may hand out what the process already holds."""
    block = mmap.mmap(-1, 128 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, len(block), mmap.PAGESIZE):
        block[start] = 1
    return block


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_peak_resident_memory_sees_an_allocation_and_keeps_it_until_reset():
    meter = MemoryMeter("cpu")
    meter.reset_peak()
    before = meter.snapshot().rss_peak
    with touched_pages():
        during = meter.snapshot().rss_peak
    # Linux counts pages per thread in batches, so a reading may be off by some hundred KiB.
    assert during - before > 96 * MIB
    assert meter.snapshot().rss_peak >= during - 4 * MIB
    meter.reset_peak()
    assert during - meter.snapshot().rss_peak > 96 * MIB


PLATFORMS = [("darwin", 1), ("freebsd14", 1024), ("without resource", None)]


@pytest.mark.parametrize(("platform", "unit"), PLATFORMS)
def test_peak_without_proc_comes_from_maxrss_if_that_is_there(platform, unit, monkeypatch):
    def fail(*args, **kwargs):
        raise FileNotFoundError("no /proc")

    absent = types.SimpleNamespace(read_text=fail, write_text=fail)
    usage = types.SimpleNamespace(ru_maxrss=5 * MIB)
    fake = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage) if unit else None
    monkeypatch.setattr(memory_meter, "Path", lambda path: absent)
    monkeypatch.setitem(sys.modules, "resource", fake)
    monkeypatch.setattr(sys, "platform", platform)
    assert memory_meter.peak_rss_bytes() == (5 * MIB * unit if unit else None)
    memory_meter.reset_peak_rss()


def segment(device, pool, total, allocated):
    sizes = {"total_size": total * MIB, "allocated_size": allocated * MIB}
    return {"device": device, "segment_pool_id": pool, **sizes}


# A graph of 20 MiB keeps 2 MiB of gradients allocated; then come the cache and another GPU's graph.
SEGMENTS = [segment(1, (0, 7), 20, 2), segment(1, (0, 0), 50, 1), segment(0, (0, 7), 20, 2)]


@pytest.mark.parametrize(
    ("segments", "backend", "max_reserved", "max_allocated"),
    [
        (SEGMENTS, "native", 90, 3 + 18),
        (SEGMENTS, "native", 20, 20),  # the peak of 3 MiB came before the graph
        (SEGMENTS, "cudaMallocAsync", 90, 3),
        ([], "native", 3, 3),
    ],
)
def test_cuda_columns_come_from_the_allocator_and_nvml(
    segments, backend, max_reserved, max_allocated, monkeypatch
):
    asked = []
    figures = {"memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 3}
    for name, mib in {**figures, "max_memory_reserved": max_reserved}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, mib=mib: mib * MIB)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(env, "nvml_handle", lambda device: asked.append(device) or "handle")
    monkeypatch.setattr(env, "device_used_bytes", lambda handle: 4 * MIB)
    meter = MemoryMeter("cuda:1")
    assert asked == []  # building a meter touches nothing
    meter.snapshot()
    assert meter.snapshot() == MemoryMeter("cuda").snapshot()
    assert meter.snapshot().to_dict() == {
        "allocated_mib": 1.0,
        "reserved_mib": 2.0,
        "max_allocated_mib": max_allocated,
        "device_used_mib": 4.0,
        "rss_peak_mib": None,
    }
    # the handle is looked up once for each meter
    assert asked == [torch.device("cuda:1"), torch.device("cuda")]
