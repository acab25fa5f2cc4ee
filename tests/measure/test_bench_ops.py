"""Operations beside a copy: what is timed is checked, and what fails costs the others nothing."""

import dataclasses
import json

import pytest
import torch

from tresnet.errors import InputError
from tresnet.measure import bench_ops as module
from tresnet.measure.bench_ops import OpsSettings, bench_ops, parse_contender
from tresnet.measure.clock import HeldClock
from tresnet.measure.ops_table import OPS
from tresnet.measure.report import read_record
from tresnet.measure.runner import RunSettings
from tresnet.ops import tiles
from tresnet.ops.abn import launch
from tresnet.ops.tiles import interpreted

pytestmark = pytest.mark.usefixtures("quick", "without_inductor")
needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="without Triton's interpreter the kernels need a GPU"
)


@pytest.fixture
def without_inductor(monkeypatch):
    """The compiler takes seconds for each operation, and is not what is tested."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: lambda *a: function(*a))


@pytest.fixture
def measured(tmp_path):
    """Measure operations; returns the rows, as they are in the record."""

    def measure(names, rounds=1, limit_s=None, **settings):
        outcome, record = bench_ops(
            names,
            OpsSettings(**{"batch_size": 2, "input_size": 32, **settings}),
            RunSettings(rounds, limit_s),
            output_dir=tmp_path,
            argv=["tresnet"],
            log=lambda line: None,
        )
        assert json.loads(json.dumps(outcome.rows)) == read_record(record.path).rows
        return outcome.rows

    return measure


def replace(monkeypatch, name, **changes):
    """Replace parts of an operation of the table, and all its places but the first."""
    op = OPS[name]
    changes = {"places": op.places[:1], **changes}
    monkeypatch.setitem(module.OPS, name, dataclasses.replace(op, **changes))


def test_abn_on_the_cpu(measured):
    rows = measured(["abn"], rounds=2, dtypes=("fp32", "bf16"))
    assert len(rows) == 2 * len(OPS["abn"].places) * 2 * (3 + len(OPS["abn"].impls))
    for row in rows:
        if row["contender"] == "triton":
            assert (row["status"], row["p50_us"], row["gb_per_s"]) == ("left_out", None, None)
            assert row["error"] == "the kernels need a GPU: interpreted, their time says nothing"
            continue
        assert (row["status"], row["error"]) == ("ok", None)
        assert row["gb_per_s"] == pytest.approx(row["ideal_bytes"] / row["p50_us"] / 1e3)
        if row["contender"] == "copy":
            assert (row["share_of_copy"], row["relative_error"]) == (1.0, None)
        else:
            assert row["share_of_copy"] > 0
            assert row["relative_error"] < {"fp32": 1e-5, "bf16": 2e-2}[row["dtype"]]
    first = rows[0]
    assert (first["op"], first["place"], first["shape"]) == ("abn", "stage 1", [2, 64, 8, 8])
    assert first["ideal_bytes"] == 3 * 2 * 64 * 8 * 8 * 4


def test_the_heaviest_operation_comes_first():
    assert next(iter(OPS)) == "abn_join"


@needs_interpreter
@pytest.mark.parametrize("name", OPS)
def test_kernels_go_through_all_buffers(monkeypatch, measured, name):
    """As on a GPU: some forward passes, then as many backward ones."""
    op = OPS[name]
    small = dataclasses.replace(op.places[0], channels=3, reduction=4 if name == "stem" else 8)
    ours = op.ours
    replace(
        monkeypatch, name, ours=lambda impl: ours("triton"), impls=("reference",), places=(small,)
    )
    rows = measured([name], dtypes=("bf16",))
    assert [(row["contender"], row["error"]) for row in rows if row["status"] != "ok"] == []
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
            "expected a contender out of copy, eager, inductor, .*triton",
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
        ("eager@warps=4", "expected triton@key=number"),
    ],
)
def test_other_contenders_are_errors(text, message):
    with pytest.raises(InputError, match=message):
        OpsSettings(contenders=(text,))


@needs_interpreter
def test_kernels_cut_otherwise_are_contenders_of_their_own(monkeypatch, measured):
    """Each is checked and timed, forward and backward, with the cut it is named after."""
    seen = set()
    plan = launch.plan

    def spied(*args, **kwargs):
        cut = plan(*args, **kwargs)
        seen.add((case, cut.options["num_warps"], tiles.TILE))
        return cut

    small = dataclasses.replace(OPS["abn"].places[0], channels=3, reduction=8)
    replace(monkeypatch, "abn", places=(small,))
    monkeypatch.setattr(launch, "plan", spied)
    monkeypatch.setattr(module, "_times_kernels", lambda device: True)
    before = tiles.TILE, tiles.WARPS
    for case in ("triton", "triton@warps=2,tile=512"):
        rows = measured(["abn"], contenders=(case,))
        assert [(row["contender"], row["status"]) for row in rows] == [
            ("copy", "ok"),
            (case, "ok"),
        ] * 2
    assert seen == {("triton", *before[::-1]), ("triton@warps=2,tile=512", 2, 512)}
    assert before == (tiles.TILE, tiles.WARPS)


def test_operations_without_the_contenders_are_passed_over(measured):
    rows = measured(["blur", "abn"], contenders=(OPS["abn"].impls[0], "copy"))
    assert {row["op"] for row in rows} == {"abn", "blur"} - (
        set() if OPS["abn"].impls[0] in OPS["blur"].impls else {"blur"}
    )
    with pytest.raises(InputError, match="expected an operation that has a contender out of copy"):
        measured(["blur"], contenders=("copy",))


@pytest.mark.parametrize(("factor", "text"), [(1.01, "0.01"), (float("nan"), "nan")])
def test_what_computes_something_else_is_not_timed(monkeypatch, measured, factor, text):
    right = OPS["abn"].ours

    def wrong(impl):
        return lambda x, *vectors: right(impl)(x, *vectors) * factor

    impl = OPS["abn"].impls[0]
    replace(monkeypatch, "abn", ours=wrong, impls=(impl,))
    rows = [row for row in measured(["abn"]) if row["contender"] == impl]
    assert [(row["status"], row["p50_us"]) for row in rows] == [("wrong", None)] * 2
    assert rows[0]["error"].startswith(f"relative error {text}, allowed are 0.001")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("needs a GPU"), "left_out"),
        (RuntimeError("no such kernel"), "failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
    ],
)
def test_one_contenders_failure_leaves_the_others(monkeypatch, measured, error, status):
    def fail(impl):
        raise error

    replace(monkeypatch, "abn", ours=fail, impls=("reference",))
    rows = measured(["abn"])
    failed = [row for row in rows if row["contender"] == "reference"]
    assert [(row["status"], row["error"]) for row in failed] == [(status, str(error))] * 2
    assert all(row["p50_us"] > 0 for row in rows if row["contender"] != "reference")


def test_inputs_beyond_the_memory_leave_the_other_places_alone(monkeypatch, measured):
    make, first = OPS["blur"].make, OPS["blur"].places[0]

    def making(shape, place, *arguments):
        if place == first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return make(shape, place, *arguments)

    replace(monkeypatch, "blur", make=making, places=OPS["blur"].places)
    rows = measured(["blur"])
    full = [row for row in rows if row["place"] == first.name]
    assert {row["status"] for row in full} == {"out_of_memory"}
    assert full[0]["error"] == "CUDA out of memory. Tried to allocate 9 GiB"
    rest = {row["status"] for row in rows if row["place"] != first.name}
    assert rest == {"ok", "left_out"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "expected batch_size of at least 2, got 1"),
        ({"rounds": 0}, "expected rounds of at least 1, got 0"),
        ({"input_size": 48}, "expected input_size divisible by 32, got 48"),
        ({"limit_s": 0.0}, "expected a time limit above 0 s, got 0.0"),
        ({"device": "xpu:7"}, "expected a device of this machine"),
    ],
)
def test_bad_settings(changes, message, measured):
    with pytest.raises(InputError, match=message):
        measured(["abn"], **changes)
    with pytest.raises(InputError, match=r"expected an operation out of abn_join, .* got 'conv'"):
        measured(["conv"])


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
def test_operations_on_a_gpu(measured, cuda_device):
    rows = measured(["abn", "blur"], rounds=3, device="cuda", batch_size=32, input_size=224)
    assert [(row["contender"], row["error"]) for row in rows if row["status"] != "ok"] == []
    for row in rows:
        assert 0 < row["gb_per_s"] < 20_000
