"""Operations beside a copy: what is timed is checked, and what fails costs the others nothing."""

import json

import pytest
import torch

from tests.ops.kernels import large_tiles  # noqa: F401  makes Triton's interpreter quicker
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.norm import NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.measure import bench_ops as module
from tresnet.measure.bench_ops import bench_ops
from tresnet.measure.clock import HeldClock
from tresnet.measure.operations import OPS, SLOPE
from tresnet.measure.settings import OpsSettings
from tresnet.models.zoo import build
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

    def measure(*names, **settings):
        small = {"batch_size": 2, "input_size": 32, "rounds": 1, "device": "cpu"}
        chosen = OpsSettings(ops=names, output_dir=tmp_path, **{**small, **settings})
        outcome = bench_ops(chosen, ["tresnet"], str)
        assert json.loads(json.dumps(outcome.rows)) == json.loads(outcome.path.read_text())["rows"]
        return outcome.rows

    return measure


def replace(monkeypatch, name, **changes):
    """Replace parts of an operation of the table, and all its places but the first."""
    op = OPS[name]
    monkeypatch.setitem(OPS, name, op._replace(**{"places": op.places[:1], **changes}))


def test_abn_on_the_cpu(measured):
    rows = measured("abn", rounds=2, dtype=("fp32", "bf16"))
    assert len(rows) == 2 * len(OPS["abn"].places) * 2 * 4
    for row in rows:
        if row["contender"] == "triton":
            assert (row["status"], row["p50_us"], row["gb_per_s"]) == ("left_out", None, None)
            assert row["error"] == "the kernels need a GPU: interpreted, their time says nothing"
            continue
        assert (row["status"], row["error"]) == ("ok", None)
        assert row["gb_per_s"] == pytest.approx(row["ideal_bytes"] / row["p50_us"] / 1e3)
        if row["contender"] == "copy":
            assert (row["ratio_to_copy"], row["relative_error"]) == (1.0, None)
        else:
            assert row["ratio_to_copy"] > 0
            assert row["relative_error"] < {"fp32": 1e-5, "bf16": 2e-2}[row["dtype"]]
    first = rows[0]
    assert (first["op"], first["place"], first["shape"]) == ("abn", "stage 1", [2, 64, 8, 8])
    assert first["ideal_bytes"] == 3 * 2 * 64 * 8 * 8 * 4


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("abn_blur", "abn_se") else n for n in OPS],
)
def test_kernels_compute_what_plain_operators_do_through_all_buffers(monkeypatch, measured, name):
    """Run as on a GPU, several forward passes, then as many backward, and compare with float64."""
    place = OPS[name].places[0]
    small = place._replace(channels=3, reduction=4 if name == "stem" else 8, se=place.se and 4)
    replace(monkeypatch, name, places=(small,))
    monkeypatch.setattr(module, "_times_kernels", lambda device: True)
    rows = measured(name, dtype=("bf16",))
    assert [(row["contender"], row["error"]) for row in rows if row["status"] != "ok"] == []
    assert len(rows) == (4 if name == "stem" else 8)


def raising(error):
    def fail(*inputs):
        raise error

    return fail


@pytest.mark.parametrize(
    ("fused", "status", "text"),
    [
        (
            lambda *x: OPS["abn_blur"].plain(*x) * 1.01,
            "wrong",
            "relative error 0.01, allowed are 0.001",
        ),
        (lambda *x: OPS["abn_blur"].plain(*x) * torch.nan, "wrong", "relative error nan, allowed"),
        (raising(RuntimeError("no such kernel")), "failed", "no such kernel"),
        (raising(torch.OutOfMemoryError("CUDA out of memory")), "out_of_memory", "CUDA out of"),
    ],
)
def test_what_fails_or_computes_something_else_is_not_timed_and_leaves_the_others(
    monkeypatch, measured, fused, status, text
):
    replace(monkeypatch, "abn_blur", fused=fused)
    monkeypatch.setattr(module, "_times_kernels", lambda device: True)
    rows = measured("abn_blur")
    failed = [row for row in rows if row["contender"] == "triton"]
    assert [(row["status"], row["p50_us"]) for row in failed] == [(status, None)] * 2
    assert failed[0]["error"].startswith(text)
    assert all(row["p50_us"] > 0 for row in rows if row["contender"] != "triton")


def test_inputs_beyond_the_memory_leave_the_other_places_alone(monkeypatch, measured):
    make, first = OPS["abn_blur"].make, OPS["abn_blur"].places[0]

    def making(shape, place, *arguments):
        if place == first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return make(shape, place, *arguments)

    replace(monkeypatch, "abn_blur", make=making, places=OPS["abn_blur"].places)
    rows = measured("abn_blur")
    full = [row for row in rows if row["place"] == first.name]
    assert {row["status"] for row in full} == {"out_of_memory"}
    assert full[0]["error"] == "CUDA out of memory. Tried to allocate 9 GiB"
    rest = {row["status"] for row in rows if row["place"] != first.name}
    assert rest == {"ok", "left_out"}


def test_places_are_those_of_the_model():
    norms, gates, blurs = set(), set(), set()

    def note(module, arguments, output):
        shape = (arguments[0].shape[1], 224 // arguments[0].shape[2])
        if isinstance(module, SqueezeExcite):
            gates.add((*shape, module.fc1.out_channels))
        elif isinstance(module, BlurPool2d):
            blurs.add(shape)
        else:
            norms.add((*shape, module.slope))

    model = build("tresnet_m", device="meta")
    for part in model.modules():
        if isinstance(part, NormAct | SqueezeExcite | BlurPool2d):
            part.register_forward_hook(note)
    model(torch.empty(2, 3, 224, 224, device="meta"))
    for name, op in OPS.items():
        for place in op.places:
            shape = (place.channels, place.reduction)
            if name.startswith("abn"):
                assert (*shape, None if name == "abn_join" else SLOPE) in norms, (name, place)
            if place.se:
                assert (*shape, place.se) in gates, (name, place)
            if "blur" in name:
                assert shape in blurs, (name, place)
    # no place of the model is left out
    halved = {(p.channels, p.reduction) for p in OPS["abn_blur"].places}
    assert halved == blurs
    joined = {(p.channels, p.reduction) for p in OPS["abn_join"].places}
    assert joined == {(c, r) for c, r, slope in norms if slope is None}
    assert next(iter(OPS)) == "abn_join"  # the heaviest comes first


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("abn", 3, 5),
        ("abn_blur", 2.25, 3.5),
        ("abn_se", 4, 5),
        ("abn_join", 4, 6),
        ("stem", 3, None),
    ],
)
def test_ideal_bytes_in_sizes_of_the_input(name, forward, backward):
    op, shape = OPS[name], (2, 3 if name == "stem" else 8, 8, 8)
    inputs = op.make(shape, op.places[0], torch.bfloat16, torch.device("cpu"))
    x, y = inputs.maps[0], op.plain(*inputs.maps, *inputs.vectors)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert bool(inputs.differentiated()) == (backward is not None)
    expected = {"forward": forward * x.nbytes}
    expected |= {} if backward is None else {"backward": backward * x.nbytes}
    assert op.ideal_bytes(x.nbytes, y.nbytes) == expected


class FakeGpu:
    """Events and a waiting kernel on a time line: the device sleeps, then takes 1 ms a call."""

    def __init__(self, host_cycles):
        self.host_cycles, self.slept = host_cycles, []

    def event(self, enable_timing):
        gpu = self

        class Event:
            def record(self, stream):
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
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.slept.append)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock, prepared = HeldClock(torch.device("cuda")), []
    calls = [lambda: None] * 4
    assert clock.seconds_per_call(lambda: prepared.append(1) or calls) == 0.001
    assert (len(gpu.slept), len(prepared), clock.late_blocks) == (sleeps, sleeps, late)


@pytest.mark.gpu
def test_operations_on_a_gpu(measured):
    rows = measured("abn", "abn_blur", rounds=3, device="cuda", batch_size=32, input_size=224)
    assert [(row["contender"], row["error"]) for row in rows if row["status"] != "ok"] == []
    for row in rows:
        assert 0 < row["gb_per_s"] < 20_000
