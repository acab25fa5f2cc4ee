import mmap
import sys

import pytest
import torch

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


@pytest.mark.gpu
def test_cuda_columns_come_from_the_allocator_and_nvml_and_have_a_graphs_memory():
    def work():
        return (torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") + 1).sum()

    work()
    graph, meter = torch.cuda.CUDAGraph(), MemoryMeter("cuda")
    with torch.cuda.graph(graph):
        work()
    torch.cuda.empty_cache()
    meter.reset_peak()
    graph.replay()
    snapshot = meter.snapshot()
    assert snapshot.allocated == torch.cuda.memory_allocated()
    assert snapshot.reserved == torch.cuda.memory_reserved()
    # the pool keeps what a replay uses, which PyTorch counts as reserved alone
    assert 128 * MIB <= snapshot.max_allocated <= snapshot.reserved
    assert snapshot.device_used is None or snapshot.device_used > snapshot.reserved
    assert snapshot.rss_peak is None
