import json

import pytest
import torch
from torch import nn
from triton.runtime.errors import OutOfResources

from tresnet.errors import InputError, MissingDependencyError
from tresnet.layers.norm import ABN
from tresnet.measure import bench, steps
from tresnet.measure.bench import bench_infer, bench_train
from tresnet.measure.cases import BenchCase
from tresnet.measure.memory import MemorySnapshot
from tresnet.measure.results import BenchInterrupt, BenchRow, BenchSettings
from tresnet.models import zoo

QUICK = BenchSettings(warmup_steps=1, rounds=2, steps_per_round=1)
GPU_COLUMNS = ("allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib")


def case(model="tresnet_t", **changes):
    return BenchCase(model, **{"batch_size": 2, "input_size": 32, "dtype": "fp32", **changes})


def quiet(line):
    """Progress nobody reads."""


@pytest.mark.parametrize("measure", [bench_train, bench_infer])
def test_models_side_by_side_on_the_cpu(measure):
    cases = [
        case(),
        case(norm="batchnorm", channels_last=True),
        case("timm:test_resnet"),
        case("torchvision:squeezenet1_1"),
    ]
    rows = measure(cases, QUICK, log=quiet)
    assert [row.case.model for row in rows] == [one.model for one in cases]
    assert [row.status for row in rows] == ["ok"] * 4
    assert [row.ratio_to_first is None for row in rows] == [False] * 4
    assert rows[0].ratio_to_first == 1.0
    for row in rows:
        assert row.speed.p20_images_per_s <= row.speed.p50_images_per_s
        assert row.speed.p50_images_per_s <= row.speed.p80_images_per_s
        assert len(row.round_p50_images_per_s) == 2
        assert row.warmup_s > 0
        columns = row.to_dict()
        assert columns["rss_peak_mib"] > 100
        assert [columns[name] for name in GPU_COLUMNS] == [None] * 4
        json.dumps(columns, allow_nan=False)
    assert rows[0].parameters == 1_459_816


def test_a_folded_model_is_what_is_timed():
    device = torch.device("cpu")
    plain, folded = (
        steps.prepare(case(norm="batchnorm", fold=fold), False, device, seed=0)
        for fold in (False, True)
    )
    torch.testing.assert_close(folded.run(), plain.run(), rtol=1e-3, atol=1e-5)
    assert folded.parameters < plain.parameters  # one bias for gamma and beta
    (row,) = bench_infer([case(fold=True, channels_last=True)], QUICK, log=quiet)
    assert row.status == "ok"
    assert row.to_dict()["fold"] is True


def test_a_padded_model_is_what_is_timed(monkeypatch):
    def narrow(name, norm):
        return zoo.build(name, norm=norm or "abn", width_factor=0.3)

    monkeypatch.setattr(steps, "build_named", narrow)
    plain, padded = (
        steps.prepare(case(pad=pad), True, torch.device("cpu"), seed=0) for pad in (False, True)
    )
    assert padded.parameters > plain.parameters
    torch.testing.assert_close(padded.run(), plain.run(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "changes", "reads"),
    [
        ("tresnet_t", {"channels_last": True}, torch.uint8),
        ("tresnet_t", {"channels_last": True, "dtype": "bf16", "cast": "pure"}, torch.uint8),
        ("tresnet_t", {}, torch.float32),
        ("timm:test_resnet", {"channels_last": True}, torch.float32),
        ("timm:test_resnet", {"dtype": "bf16", "cast": "pure"}, torch.bfloat16),
        ("timm:test_resnet", {"dtype": "bf16", "cast": "autocast"}, torch.float32),
    ],
)
def test_bytes_are_fed_to_ours_and_divided_for_others(monkeypatch, model, changes, reads):
    models, seen, build = [], [], steps.build_named
    monkeypatch.setattr(
        steps, "build_named", lambda *a, **k: models.append(build(*a, **k)) or models[-1]
    )
    chosen = case(model, input="uint8", **changes)
    step = steps.prepare(chosen, False, torch.device("cpu"), seed=0)
    models[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits, (images,) = step.run(), seen
    assert images.dtype == reads
    layout = torch.channels_last if chosen.channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    values = images.double() * (1 if reads == torch.uint8 else 255)
    tolerance = 0.5 if reads == torch.bfloat16 else 1e-4  # half of the last of 8 bits
    torch.testing.assert_close(values, values.round(), rtol=0, atol=tolerance)
    assert values.max().round() == 255
    if reads == torch.uint8:
        floats = (images.float() / 255).to(logits.dtype)
        torch.testing.assert_close(logits, models[0](floats), rtol=1e-2, atol=1e-3)


def test_bytes_are_fed_to_training(recorded):
    (row,) = bench_train([case("a", input="uint8")], QUICK, log=quiet)
    assert (row.status, row.to_dict()["input"]) == ("ok", "uint8")


def test_the_time_limit_ends_setting_up_and_rounds(recorded, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    settings = BenchSettings(warmup_steps=1, rounds=1000, steps_per_round=1, time_limit_s=60.0)
    names = [f"model{number}" for number in range(40)]
    rows = bench_infer([case(name) for name in names], settings, log=quiet)
    done = [row for row in rows if row.status == "ok"]
    late = [row for row in rows if row.status == "out_of_time"]
    assert 0 < len(done) < len(rows) == len(done) + len(late)
    assert rows[: len(done)] == done
    assert all(row.speed is not None for row in done)
    assert len(done[0].round_p50_images_per_s) < 1000
    assert late[0].error == "not begun: the time limit of 60 s was near"
    assert {name for name, *_ in recorded.calls} == set(names[: len(done)])


def test_freezing_is_asked_of_the_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: asked.append(how) or model)
    for freeze in (False, True):
        chosen = case(compile="max-autotune-no-cudagraphs", freeze=freeze)
        steps.prepare(chosen, False, torch.device("cpu"), seed=0)
    plain, frozen = asked
    assert plain == {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
    assert frozen["options"] == {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "freezing": True,
    }


def test_the_partitioner_is_told_while_it_compiles(monkeypatch):
    from torch._functorch import config

    told = []

    def compiled(model, **how):
        def run(images):
            told.append(config.aggressive_recomputation)
            return model(images)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    for partitioner in (None, "aggressive"):
        chosen = case(compile="default", partitioner=partitioner)
        step = steps.prepare(chosen, True, torch.device("cpu"), seed=0)
        for _ in range(3):
            step.run()
    assert told == [False] * 3 + [True] * 3
    assert not config.aggressive_recomputation


def test_what_is_recomputed_reaches_the_model(monkeypatch):
    models, build = [], steps.build_named
    monkeypatch.setattr(
        steps, "build_named", lambda *a, **k: models.append(build(*a, **k)) or models[-1]
    )
    for recompute in ("none", "outputs"):
        steps.prepare(case(recompute=recompute), True, torch.device("cpu"), seed=0)
    kept, dropped = (
        [block.keep_output for block in model.modules() if hasattr(block, "keep_output")]
        for model in models
    )
    assert all(kept)
    assert not all(dropped)
    assert [model.recompute for model in models] == ["none", "outputs"]


@pytest.mark.slow
def test_the_aggressive_partitioner_saves_less(monkeypatch):
    compiler, saved = torch.compile, []

    def partitioned_only(model, **how):
        torch.compiler.reset()  # both cases compile the same code
        return compiler(model, backend="aot_eager_decomp_partition", dynamic=False)

    def bytes_saved(partitioner):
        chosen = case(compile="default", partitioner=partitioner)
        step = steps.prepare(chosen, True, torch.device("cpu"), seed=0)
        step.run()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            step.run()
        return sum(x.numel() * x.element_size() for x in saved if not isinstance(x, nn.Parameter))

    monkeypatch.setattr(torch, "compile", partitioned_only)
    default, aggressive = bytes_saved(None), bytes_saved("aggressive")
    assert 0 < aggressive < 0.8 * default


@pytest.mark.parametrize("impl", [None, "reference"])
def test_the_implementation_reaches_the_model(monkeypatch, impl):
    models, build = [], steps.build_named
    monkeypatch.setattr(
        steps, "build_named", lambda *a, **k: models.append(build(*a, **k)) or models[-1]
    )
    steps.prepare(case(impl=impl), False, torch.device("cpu"), seed=0)
    found = {module.impl for module in models[0].modules() if isinstance(module, ABN)}
    assert found == {impl or "auto"}


@pytest.mark.parametrize(
    ("measure", "changes", "cast"),
    [
        (bench_train, {"dtype": "bf16"}, "autocast"),
        (bench_train, {"dtype": "fp16"}, "autocast"),
        (bench_infer, {"dtype": "bf16"}, "pure"),
        (bench_infer, {"dtype": "bf16", "cast": "autocast"}, "autocast"),
    ],
)
def test_sixteen_bits(measure, changes, cast):
    (row,) = measure([case("timm:test_resnet", **changes)], QUICK, log=quiet)
    assert (row.status, row.case.cast) == ("ok", cast)


def test_input_size_is_the_models_own_by_default():
    (row,) = bench_infer([case(input_size=None)], QUICK, log=quiet)
    assert row.case.input_size == 32


class Recorder(nn.Module):
    """Writes down what it is called with; optionally fails."""

    num_classes = 3

    def __init__(self, name, calls, error_after=None, error=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.name, self.calls, self.error_after, self.error = name, calls, error_after, error
        self.own_calls = 0

    def forward(self, images):
        self.calls.append((self.name, images.dtype, self.training, torch.is_grad_enabled()))
        self.own_calls += 1
        if self.error_after is not None and self.own_calls > self.error_after:
            raise self.error
        return images.mean((2, 3)) * self.weight


@pytest.fixture
def recorded(monkeypatch):
    """Models called a, b, ... that record; `recorded.errors['b'] = (after, error)` breaks one."""
    calls, errors = [], {}

    def build(name, norm):
        return Recorder(name, calls, *errors.get(name, (None, None)))

    monkeypatch.setattr(steps, "build_named", build)
    monkeypatch.setattr(BenchCase, "checked", lambda self, training: self)
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)  # 0.2 s each, and nothing here to free
    build.calls, build.errors = calls, errors
    return build


SETTLE = bench.SETTLE_STEPS


def visits(names):
    """Runs of equal names, shortened to (name, count)."""
    runs = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return [tuple(run) for run in runs]


def test_rounds_visit_every_case_forwards_and_backwards(recorded):
    settings = BenchSettings(warmup_steps=3, rounds=2, steps_per_round=4)
    bench_infer([case("a"), case("b")], settings, log=quiet)
    assert visits(name for name, *_ in recorded.calls) == [
        ("a", 3 + SETTLE),
        ("b", 3 + SETTLE),
        ("a", SETTLE + 4),
        ("b", 2 * (SETTLE + 4)),  # the second round comes back from the end
        ("a", SETTLE + 4),
    ]


def test_without_interleaving_a_case_is_finished_before_the_next(recorded):
    settings = BenchSettings(warmup_steps=3, rounds=2, steps_per_round=4, interleave=False)
    rows = bench_infer([case("a"), case("b")], settings, log=quiet)
    each = 3 + SETTLE + 2 * (SETTLE + 4)
    assert visits(name for name, *_ in recorded.calls) == [("a", each), ("b", each)]
    assert [row.ratio_to_first for row in rows] == [None, None]


def test_modes_and_dtypes_reach_the_model(recorded):
    bench_infer([case("a", dtype="fp16", cast="pure")], QUICK, log=quiet)
    assert set(recorded.calls) == {("a", torch.float16, False, False)}
    recorded.calls.clear()
    bench_train([case("a", dtype="bf16", cast="autocast")], QUICK, log=quiet)
    assert set(recorded.calls) == {("a", torch.float32, True, True)}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("no kernel for this dtype\nsecond line"), "failed"),
        (OutOfResources(99, 64, "registers"), "failed"),
    ],
)
@pytest.mark.parametrize("after", [0, 6], ids=["warm-up", "timing"])
def test_failure_of_one_case_is_noted_and_the_run_goes_on(recorded, error, status, after):
    recorded.errors["a"] = (after, error)
    broken, fine = bench_infer([case("a"), case("b")], QUICK, log=quiet)
    assert (broken.status, broken.speed, broken.memory) == (status, None, None)
    assert broken.error == (str(error).splitlines() or ["MemoryError"])[0]
    assert fine.status == "ok"
    assert fine.ratio_to_first == 1.0  # the first that could be timed
    columns = broken.to_dict()
    assert columns["p50_images_per_s"] is None
    assert columns["max_allocated_mib"] is None
    assert columns["round_p50_images_per_s"] == []


@pytest.mark.parametrize(
    ("after", "statuses", "rounds"), [(7, ["ok", "ok"], [1, 1]), (4, ["ok", "interrupted"], [1, 0])]
)
def test_what_was_timed_before_an_interrupt_is_kept(recorded, after, statuses, rounds):
    recorded.errors["b"] = (after, KeyboardInterrupt())
    with pytest.raises(BenchInterrupt) as stop:
        bench_infer([case("a"), case("b")], QUICK, log=quiet)
    assert [row.status for row in stop.value.rows] == statuses
    assert [len(row.round_p50_images_per_s) for row in stop.value.rows] == rounds
    assert stop.value.rows[0].speed is not None


def test_an_interrupt_before_anything_was_timed_leaves_nothing(recorded):
    recorded.errors["b"] = (0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as stop:
        bench_infer([case("a"), case("b")], QUICK, log=quiet)
    assert not isinstance(stop.value, BenchInterrupt)


def test_programming_errors_are_not_hidden(recorded):
    recorded.errors["a"] = (0, TypeError("wrong argument"))
    with pytest.raises(TypeError, match="wrong argument"):
        bench_infer([case("a")], QUICK, log=quiet)


def test_our_own_errors_are_not_hidden(recorded):
    recorded.errors["a"] = (0, MissingDependencyError("inplace-abn is missing: pip install it"))
    with pytest.raises(MissingDependencyError, match="inplace-abn is missing"):
        bench_infer([case("a")], QUICK, log=quiet)


def test_output_that_is_not_finite_is_told(recorded, monkeypatch):
    monkeypatch.setattr(Recorder, "forward", lambda self, images: images.mean((2, 3)) / 0)
    (row,) = bench_infer([case("a")], QUICK, log=quiet)
    assert row.status == "not_finite"
    assert row.speed is not None


def test_compile_mode_reaches_torch_compile(recorded, monkeypatch):
    compiled = []

    def compile_model(model, **options):
        compiled.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile_model)
    rows = bench_infer([case("a"), case("b", compile="max-autotune")], QUICK, log=quiet)
    assert [row.status for row in rows] == ["ok", "ok"]
    assert compiled == [{"mode": "max-autotune", "dynamic": False}]


def test_wrong_name_is_found_before_anything_runs(monkeypatch):
    monkeypatch.setattr(bench, "prepare", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(InputError, match="unknown model 'tresnet_y'"):
        bench_train([case(), case("tresnet_y")], QUICK)


@pytest.mark.parametrize("interleave", [True, False])
def test_wrong_input_size_is_found_before_anything_runs(interleave, monkeypatch):
    monkeypatch.setattr(bench, "prepare", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(InputError, match="divisible by 2"):
        bench_train([case(), case(input_size=33)], BenchSettings(interleave=interleave))


def test_no_cases():
    with pytest.raises(InputError, match="at least one model to measure, got none"):
        bench_infer([], QUICK)


@pytest.mark.parametrize("name", ["warmup_steps", "rounds", "steps_per_round"])
def test_counts_below_one(name):
    with pytest.raises(InputError, match=f"expected {name} of at least 1, got 0"):
        BenchSettings(**{name: 0})


def test_a_time_limit_that_is_no_number():
    with pytest.raises(InputError, match="expected a time limit above 0 s, got nan"):
        BenchSettings(time_limit_s=float("nan"))


def test_own_memory_leaves_others_out_but_not_the_shared_workspace():
    primed = MemorySnapshot(allocated=32, reserved=64)
    first = bench._own_memory(MemorySnapshot(200, 300, 1000, 5000), MemorySnapshot(32, 64), primed)
    assert first == MemorySnapshot(200, 300, 1000, 5000)
    second = bench._own_memory(
        MemorySnapshot(300, 500, 1168, 5000), MemorySnapshot(200, 264), primed
    )
    assert second == MemorySnapshot(132, 300, 1000, 5000)


def test_row_without_memory_has_none_everywhere():
    columns = BenchRow(case()).to_dict()
    assert [columns[name] for name in (*GPU_COLUMNS, "rss_peak_mib")] == [None] * 5


def test_cudnn_search_is_put_back():
    before = torch.backends.cudnn.benchmark
    bench_infer([case()], QUICK, log=quiet)
    assert torch.backends.cudnn.benchmark == before


@pytest.mark.slow
def test_compiled_model_on_the_cpu():
    (row,) = bench_infer([case("timm:test_resnet", compile="default")], QUICK, log=quiet)
    assert (row.status, row.error) == ("ok", None)


@pytest.mark.gpu
@pytest.mark.parametrize("measure", [bench_train, bench_infer])
def test_models_side_by_side_on_a_gpu(measure, cuda_device):
    settings = BenchSettings(device="cuda", warmup_steps=3, rounds=2, steps_per_round=3)
    cases = [
        case(batch_size=16, dtype="bf16", channels_last=True),
        case(batch_size=16, dtype="fp16", norm="batchnorm"),
        case("timm:test_resnet", batch_size=16, dtype="fp32"),
    ]
    rows = measure(cases, settings, log=quiet)
    assert [(row.status, row.error) for row in rows] == [("ok", None)] * 3
    for row in rows:
        assert row.memory.rss_peak is None
        assert 0 < row.memory.max_allocated <= row.memory.reserved
        assert row.speed.p50_images_per_s > 0


@pytest.mark.gpu
def test_memory_of_a_case_does_not_depend_on_its_place(cuda_device):
    settings = BenchSettings(device="cuda", warmup_steps=3, rounds=1, steps_per_round=1)
    one, other = case(batch_size=64), case("timm:test_resnet", batch_size=64, input_size=160)
    forwards = bench_train([one, other], settings, log=quiet)
    backwards = bench_train([other, one], settings, log=quiet)
    for first, second in zip(forwards, reversed(backwards), strict=True):
        assert first.memory.max_allocated == pytest.approx(second.memory.max_allocated, rel=0.02)


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu_is_noted_and_freed(cuda_device):
    settings = BenchSettings(device="cuda", warmup_steps=1, rounds=1, steps_per_round=1)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        huge, fine = bench_train(
            [case(batch_size=512, input_size=512), case(batch_size=2)], settings, log=quiet
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (huge.status, huge.speed) == ("out_of_memory", None)
    assert fine.status == "ok"
    assert torch.cuda.memory_allocated() < 2**28


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("measure", [bench_train, bench_infer])
def test_compiled_model_on_a_gpu(measure, mode, cuda_device):
    settings = BenchSettings(
        device="cuda", warmup_steps=4, rounds=2, steps_per_round=2, interleave=False
    )
    cases = [
        case("timm:test_resnet", batch_size=8, dtype="bf16", compile=mode),
        case("timm:test_resnet", batch_size=16, dtype="bf16", compile=mode),
    ]
    rows = measure(cases, settings, log=quiet)
    assert [(row.status, row.error) for row in rows] == [("ok", None)] * 2
