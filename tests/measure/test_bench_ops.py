import dataclasses
import json

import pytest
import torch

from tresnet.errors import InputError
from tresnet.measure import bench_ops as module
from tresnet.measure.bench_ops import OpsSettings, bench_ops, parse_contender
from tresnet.measure.held_clock import HeldClock
from tresnet.measure.ops_table import OPS
from tresnet.measure.read_records import COLUMNS
from tresnet.measure.records import write_record
from tresnet.measure.results import BenchInterrupt
from tresnet.ops import tiles
from tresnet.ops.abn import launch
from tresnet.ops.tiles import interpreted

QUICK = OpsSettings(batch_size=2, input_size=32, repeats=3)


@pytest.fixture
def without_inductor(monkeypatch):
    """The compiler takes seconds for each operation, and is not what is tested."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)


@pytest.mark.usefixtures("without_inductor")
def test_abn_on_the_cpu():
    lines = []
    rows = bench_ops(["abn"], ["fp32", "bf16"], QUICK, lines.append)
    places = [place.name for place in OPS["abn"].places]
    assert len(lines) == 2 * len(places)
    assert len(rows) == 2 * len(places) * 2 * 5
    for row in rows:
        for column, kind in COLUMNS["bench_ops"].items():
            assert isinstance(getattr(row, column), kind), column
        if row.contender == "triton":
            assert (row.status, row.p50_us, row.gb_per_s) == ("left_out", None, None)
            assert row.note == "the kernels need a GPU: interpreted, their time says nothing"
            continue
        assert (row.status, row.note) == ("ok", None)
        assert row.gb_per_s == pytest.approx(row.ideal_bytes / row.p50_us / 1e3)
        if row.contender == "copy":
            assert (row.share_of_copy, row.relative_error) == (1.0, None)
        else:
            assert row.share_of_copy > 0
            assert row.relative_error < {"fp32": 1e-5, "bf16": 2e-2}[row.dtype]
    first = rows[0]
    assert (first.op, first.place, first.shape) == ("abn", "stage 1", [2, 64, 8, 8])
    assert first.ideal_bytes == 3 * 2 * 64 * 8 * 8 * 4
    json.dumps([dataclasses.asdict(row) for row in rows], allow_nan=False)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.skipif(not interpreted(), reason="without Triton's interpreter the kernels need a GPU")
@pytest.mark.parametrize("name", OPS)
def test_kernels_go_through_all_buffers(monkeypatch, name):
    """As on a GPU: some forward passes, then as many backward ones."""
    op = OPS[name]
    small = dataclasses.replace(op.places[0], channels=3, reduction=4 if name == "stem" else 8)
    disguised = dataclasses.replace(
        op, ours=lambda impl: op.ours("triton"), impls=("reference",), places=(small,)
    )
    monkeypatch.setitem(module.OPS, name, disguised)
    rows = bench_ops([name], ["bf16"], dataclasses.replace(QUICK, repeats=1), str)
    assert {(row.contender, row.status, row.note) for row in rows if row.status != "ok"} == set()
    assert len(rows) == (4 if name == "stem" else 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eager", ("eager", {})),
        ("triton", ("triton", {})),
        ("triton@warps=8,most_tiles=3", ("triton", {"warps": 8, "most_tiles": 3})),
    ],
)
def test_contenders_are_read(text, expected):
    assert parse_contender(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cudnn",
            "expected a contender out of copy, eager, inductor, recompute, triton, reference",
        ),
        ("triton@", "expected triton@key=number"),
        ("triton@stages=2", "with keys out of tile, blur_tile, warps, programs, most_tiles"),
        ("triton@warps=8,warps=4", "each once"),
        ("triton@warps=0", "expected a power of two from 1 to 32 for warps"),
        ("triton@blur_tile=4", "from 256 to 65536 for blur_tile"),
        ("triton@warps=-4", "expected triton@key=number"),
        ("triton@programs=9999999999", "expected triton@key=number"),
        ("triton@programs=0", "expected a number from 1 to 65536 for programs"),
        ("triton@tile=3000", "expected a power of two from 512"),
        ("recompute@warps=4", "expected triton@key=number"),
    ],
)
def test_other_contenders_are_errors(text, message):
    with pytest.raises(InputError, match=message):
        OpsSettings(contenders=(text,))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.skipif(not interpreted(), reason="without Triton's interpreter the kernels need a GPU")
def test_kernels_cut_otherwise_are_contenders_of_their_own(monkeypatch):
    """Each is checked and timed, forward and backward, with the cut it is named after."""
    seen = set()
    plan = launch.plan

    def spied(*args, **kwargs):
        cut = plan(*args, **kwargs)
        seen.add((case, cut.options["num_warps"], tiles.TILE))
        return cut

    op = OPS["abn"]
    small = dataclasses.replace(op.places[0], channels=3, reduction=8)
    monkeypatch.setitem(module.OPS, "abn", dataclasses.replace(op, places=(small,)))
    monkeypatch.setattr(launch, "plan", spied)
    monkeypatch.setattr(module, "_times_kernels", lambda device: True)
    before = tiles.TILE, tiles.WARPS
    for case in ("triton", "triton@warps=2,tile=512"):
        settings = dataclasses.replace(QUICK, repeats=1, contenders=(case,))
        rows = bench_ops(["abn"], ["fp32"], settings, str)
        assert [(row.contender, row.status) for row in rows] == [("copy", "ok"), (case, "ok")] * 2
    assert seen == {("triton", *before[::-1]), ("triton@warps=2,tile=512", 2, 512)}
    assert before == (tiles.TILE, tiles.WARPS)


@pytest.mark.usefixtures("without_inductor")
def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    whole, places = module.measure_place, []

    def measured(op, name, place, *rest):
        if places:
            raise KeyboardInterrupt
        places.append(place.name)
        return whole(op, name, place, *rest)

    monkeypatch.setattr(module, "measure_place", measured)
    settings = dataclasses.replace(QUICK, contenders=("eager",))
    with pytest.raises(BenchInterrupt) as stop:
        bench_ops(["abn"], ["fp32"], settings, str)
    assert {row.place for row in stop.value.rows} == set(places)
    with pytest.raises(KeyboardInterrupt) as stop:  # nothing was measured
        bench_ops(["abn"], ["fp32"], settings, str)
    assert not isinstance(stop.value, BenchInterrupt)


@pytest.mark.usefixtures("without_inductor")
def test_operations_without_the_contenders_are_passed_over():
    lines = []
    settings = dataclasses.replace(QUICK, contenders=("recompute",))
    assert bench_ops(["blur"], ["fp32"], settings, lines.append) == []
    assert lines[0] == "blur, into stage 2, fp32: has none of the contenders asked for"


@pytest.mark.usefixtures("without_inductor")
def test_what_computes_something_else_is_not_timed(monkeypatch):
    op = OPS["abn"]

    def wrong(impl):
        right = op.ours("recompute")
        return lambda x, *vectors: right(x, *vectors) * 1.01

    broken = dataclasses.replace(op, ours=wrong, impls=("recompute",), places=op.places[:1])
    monkeypatch.setitem(module.OPS, "abn", broken)
    rows = [row for row in bench_ops(["abn"], ["fp32"], QUICK, str) if row.contender == "recompute"]
    assert [(row.status, row.p50_us) for row in rows] == [("wrong", None)] * 2
    assert rows[0].relative_error == pytest.approx(0.01, rel=0.1)
    assert "relative error 0.01, allowed are 0.001" in rows[0].note


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("needs a GPU"), "left_out"),
        (RuntimeError("no such kernel\nsecond line"), "failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
    ],
)
def test_one_contenders_failure_leaves_the_others(monkeypatch, error, status):
    op = OPS["abn"]

    def fail(impl):
        raise error

    broken = dataclasses.replace(op, ours=fail, impls=("recompute",), places=op.places[:1])
    monkeypatch.setitem(module.OPS, "abn", broken)
    rows = bench_ops(["abn"], ["fp32"], QUICK, str)
    failed = [row for row in rows if row.contender == "recompute"]
    assert [(row.status, row.note) for row in failed] == [(status, str(error).split("\n")[0])] * 2
    assert all(row.p50_us > 0 for row in rows if row.contender != "recompute")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "expected batch_size of at least 2, got 1"),
        ({"repeats": 0}, "expected repeats of at least 1, got 0"),
        ({"input_size": 48}, "expected input_size divisible by 32, got 48"),
        ({"input_size": 0}, "expected input_size divisible by 32, got 0"),
        ({"time_limit_s": 0.0}, "expected a time limit above 0 s, got 0.0"),
        ({"time_limit_s": float("nan")}, "expected a time limit above 0 s, got nan"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(InputError, match=message):
        OpsSettings(**changes)


@pytest.mark.usefixtures("without_inductor")
def test_after_the_time_limit_nothing_is_begun():
    lines = []
    limited = dataclasses.replace(QUICK, repeats=1, time_limit_s=1e-9)
    assert bench_ops(["abn"], ["fp32"], limited, lines.append) == []
    assert lines[0] == "abn, stage 1, fp32: not begun, the time limit has passed"


def test_unknown_operation():
    with pytest.raises(InputError, match=r"expected an operation out of abn, .* got 'conv'"):
        bench_ops(["conv"], ["fp32"], QUICK, str)


class FakeGpu:
    """Events and a waiting kernel on a time line: the device sleeps, then takes 1 ms a call."""

    def __init__(self, host_cycles):
        self.host_cycles, self.slept = host_cycles, []

    def sleep(self, cycles):
        self.slept.append(cycles)

    def event(self, enable_timing):
        gpu = self

        class Event:
            def record(self):
                pass

            def query(self):
                return gpu.slept[-1] < gpu.host_cycles

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return 4.0

        return Event()


@pytest.mark.parametrize(
    ("host_cycles", "sleeps", "late"), [(1, 1, 0), (2**24, 2, 0), (2**40, 8, 1)]
)
def test_the_gpu_is_held_until_the_host_has_queued_everything(
    monkeypatch, host_cycles, sleeps, late
):
    gpu = FakeGpu(host_cycles)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock, prepared = HeldClock(torch.device("cuda")), []
    calls = [lambda: None] * 4
    assert clock.seconds_per_call(lambda: prepared.append(1) or calls) == 0.001
    assert (len(gpu.slept), len(prepared), clock.late_blocks) == (sleeps, sleeps, late)


@pytest.mark.gpu
def test_operations_on_a_gpu(cuda_device):
    settings = OpsSettings("cuda", batch_size=32, repeats=3)
    rows = bench_ops(["abn", "blur"], ["bf16"], settings, str)
    assert {(row.contender, row.status) for row in rows if row.status != "ok"} == set()
    for row in rows:
        assert 0 < row.gb_per_s < 20_000


def test_a_gradient_that_is_no_number_is_wrong_and_can_be_recorded(monkeypatch, tmp_path):
    def spoiled(found, inputs):
        return [found[0], torch.full_like(found[1], torch.nan), *found[2:]]

    computed, eager = module._Case._computed, OPS["abn"].reference

    def computing(self, function, inputs):
        found = computed(self, function, inputs)
        return found if function is eager else spoiled(found, inputs)

    monkeypatch.setattr(torch, "compile", lambda function, **how: lambda *a: function(*a))
    monkeypatch.setattr(module._Case, "_computed", computing)
    rows = bench_ops(["abn"], ["fp32"], QUICK, log=lambda line: None)
    for row in rows:
        if row.contender == "inductor":
            assert (row.status, row.relative_error) == ("wrong", None)
            assert row.note.startswith("relative error nan, allowed are ")
    write_record(
        tmp_path,
        "bench_ops",
        device="cpu",
        settings={},
        rows=[dataclasses.asdict(row) for row in rows],
        warmup_steps=1,
        runs=1,
    )


def test_inputs_beyond_the_memory_leave_the_other_places_alone(monkeypatch, tmp_path):
    make, first = OPS["blur"].make, OPS["blur"].places[0]

    def making(shape, place, *arguments):
        if place == first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return make(shape, place, *arguments)

    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setitem(OPS, "blur", dataclasses.replace(OPS["blur"], make=making))
    rows = bench_ops(["blur"], ["fp32"], QUICK, log=lambda line: None)
    full = [row for row in rows if row.place == first.name]
    assert {row.status for row in full} == {"out_of_memory"}
    assert {row.contender for row in full} >= {"copy", "eager", "inductor", "triton"}
    assert full[0].note == "CUDA out of memory. Tried to allocate 9 GiB"
    rest = {row.status for row in rows if row.place != first.name}
    assert rest == {"ok", "left_out"}
