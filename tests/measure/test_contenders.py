"""Models side by side: what is timed is the step that train.py and eval.py run."""

import json

import pytest
import torch
from torch import nn

from tests.operators import Recorder
from tresnet.measure import contenders
from tresnet.measure.cases import BenchCase
from tresnet.measure.contenders import ModelContender, bench_models, prepare, speed
from tresnet.measure.memory_meter import MemorySnapshot
from tresnet.measure.settings import StepSettings
from tresnet.settings import Compute, Step
from tresnet.settings.fields import replace
from tresnet.steps import StepHost, TrainingStep

pytestmark = pytest.mark.usefixtures("quick")
CPU = torch.device("cpu")
QUICK = {"warmup_steps": 1, "rounds": 2, "steps": 1, "device": "cpu"}


def case(model="tresnet_t", **changes):
    return replace(BenchCase(model), **{"batch_size": 2, "input_size": 32, **changes})


def measured(training, cases, folder, **changes):
    settings = StepSettings(**{**QUICK, "output_dir": folder, **changes})
    return bench_models(training, cases, settings, str)


@pytest.mark.parametrize("training", [True, False])
def test_models_side_by_side_on_the_cpu(training, tmp_path):
    cases = [
        case(input_size=None),
        case(norm="batchnorm", channels_last=True, amp="bf16"),
        case("timm:test_resnet", **({"opt": "adamw", "accumulate": 2} if training else {})),
        case("torchvision:squeezenet1_1", **({} if training else {"dtype": "bf16"})),
    ]
    outcome = measured(training, cases, tmp_path)
    record = json.loads(outcome.path.read_text())
    assert (record["rows"], record["runs"], record["warmup_steps"]) == (outcome.rows, 2, 1)
    assert (record["settings"]["rounds"], record["settings"]["sequential"]) == (2, False)
    assert "output_dir" not in record["settings"]
    assert [(row["status"], row["error"]) for row in outcome.rows] == [("ok", None)] * 4
    assert [row["model"] for row in outcome.rows] == [one.model for one in cases]
    assert outcome.rows[0]["ratio_to_first"] == 1.0
    for row in outcome.rows:
        assert row["p20_images_per_s"] <= row["p50_images_per_s"] <= row["p80_images_per_s"]
        assert len(row["round_p50_images_per_s"]) == 2
        assert row["warmup_s"] > 0
        assert row["rss_peak_mib"] > 100
        assert row["max_allocated_mib"] is None
        assert row["input_size"] == 32
    assert (outcome.rows[0]["parameters"] == 1_459_816) == training  # folded in inference


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_auxiliary_heads_train_too():
    made = prepare(case("torchvision:googlenet", input_size=64).checked(True), True, CPU)
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    assert made.run().isfinite()
    for name in ("fc.bias", "aux1.fc2.bias", "aux2.fc2.bias"):
        assert not torch.equal(made.model.get_parameter(name), before[name])


def test_percentiles_are_of_times():
    speeds = speed([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 60)
    wanted = {"p20_images_per_s": 60 / 0.5, "p50_images_per_s": 60 / 0.35}
    wanted |= {"p80_images_per_s": 60 / 0.2, "p50_step_time_ms": 350}
    assert speeds == pytest.approx(wanted)
    assert set(speed([], 60).values()) == {None}


def operations(step):
    step()  # buffers of the optimizer are made
    with Recorder() as recorder:
        step()
    return [str(function) for function, *_ in recorder.calls]


def test_a_timed_step_does_what_a_step_of_a_training_run_does(monkeypatch):
    """Compare all operations of the step except the transfer of the images to the device."""
    from tresnet.peers import build_named

    compute = Compute(amp="bf16", channels_last=True)
    step = TrainingStep(build_named("tresnet_t"), Step(compute=compute), StepHost(device=CPU))
    images, labels = torch.rand(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
    images = step.feed.images(images)

    def trained():
        step.backward(images, labels, nn.functional.cross_entropy)
        step.optimizer_step(1)

    timed, *_ = prepare(case(amp="bf16", channels_last=True).checked(True), True, CPU)
    assert operations(timed) == operations(trained)
    assert len(operations(timed)) > 500


def test_settings_reach_the_step(monkeypatch):
    """The EMA, clipped gradients and gradient accumulation are those of train.py."""
    calls = []
    backward = TrainingStep.backward
    monkeypatch.setattr(
        TrainingStep, "backward", lambda *a, **k: calls.append(k) or backward(*a, **k)
    )
    chosen = case(accumulate=2, ema_decay=0.9, clip_grad=1e-9, norm="batchnorm").checked(True)
    ready = prepare(chosen, True, CPU)
    before = [parameter.detach().clone() for parameter in ready.model.parameters()]
    ready.run()
    assert [(k["micro_batches"], k["is_last"]) for k in calls] == [(2, False), (2, True)]
    assert ready.step.model_ema.decay == 0.9
    for old, new in zip(before, ready.model.parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=1e-4)  # weight decay alone is left


@pytest.mark.parametrize(
    ("model", "changes", "reads"),
    [
        ("tresnet_t", {}, torch.uint8),
        ("tresnet_t", {"channels_last": False}, torch.float32),
        ("timm:test_resnet", {}, torch.float32),
        ("timm:test_resnet", {"dtype": "bf16"}, torch.bfloat16),
    ],
)
def test_bytes_are_fed_to_ours_and_divided_for_others(model, changes, reads):
    chosen = case(model, input="uint8", fold=False, **changes)
    step, built, *_ = prepare(chosen.checked(False), False, CPU)
    seen = []
    built.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    step()
    (images,) = seen
    assert images.dtype == reads
    assert images.is_contiguous(memory_format=chosen.step.compute.memory_format)
    largest = 255 if reads == torch.uint8 else 1
    assert images.float().max() == pytest.approx(largest, rel=0.01)


def test_inductors_layout_optimisation_is_forced_while_a_case_is_compiled(monkeypatch):
    from torch._inductor import config

    options = []

    def compiled(model, **how):
        return lambda images: options.append(config.force_layout_optimization) or model(images)

    monkeypatch.setattr(torch, "compile", compiled)
    settings = StepSettings(**QUICK)
    for layout_opt in (True, False):
        chosen = case("timm:test_resnet", compile="default", layout_opt=layout_opt).checked(True)
        contender = ModelContender(chosen, True, settings, CPU, MemorySnapshot())
        contender.set_up()
    warm, steady = [True], [False] * contenders.SETTLE_STEPS
    assert options == warm + steady + [False] + steady


def test_a_loss_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    build = contenders.build

    def spoilt(one):
        model = build(one)
        if one.batch_size == 3:
            next(model.parameters()).data.fill_(torch.nan)
        return model

    monkeypatch.setattr(contenders, "build", spoilt)
    outcome = measured(False, [case("timm:test_resnet", batch_size=3), case()], tmp_path)
    assert [row["status"] for row in outcome.rows] == ["not_finite", "ok"]
    assert outcome.rows[1]["ratio_to_first"] is None


@pytest.mark.parametrize(
    ("primed", "before", "after", "own"),
    [
        ((10, 20, 10), (110, 220, 150), (160, 520, 400), (60, 320, 260)),  # a graph holds 40
        # of an H200: the second case's tensors fill gaps of the first case
        ((64, 84, 64), (518, 682, 518), (1244, 7266, 7151), (790, 6697, 6697)),
        ((), (), (), ()),
    ],
)
def test_memory_of_other_cases_is_subtracted(primed, before, after, own):
    """Of allocated, reserved and peak; no case allocates more than it reserves."""
    snapshots = (MemorySnapshot(*sizes) for sizes in (after, before, primed))
    assert contenders._own_memory(*snapshots) == MemorySnapshot(*own)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_side_by_side_on_a_gpu(training, tmp_path, cuda_device):
    cases = [
        case(batch_size=16, channels_last=True),
        case(batch_size=16, amp="fp16", norm="batchnorm"),
        case("timm:test_resnet", batch_size=16, amp="off"),
        case(batch_size=16, channels_last=True, cuda_graph="off"),
    ]
    outcome = measured(training, cases, tmp_path, device="cuda", warmup_steps=3)
    assert [(row["status"], row["error"]) for row in outcome.rows] == [("ok", None)] * 4
    graph_mib, *_, eager_mib = (row["max_allocated_mib"] for row in outcome.rows)
    assert graph_mib > 0.95 * eager_mib
    for row in outcome.rows:
        assert row["rss_peak_mib"] is None
        assert 0 < row["max_allocated_mib"] <= row["reserved_mib"]


@pytest.mark.gpu
def test_memory_of_a_case_does_not_depend_on_its_place(tmp_path, cuda_device):
    one, other = case(batch_size=64), case("timm:test_resnet", batch_size=64, input_size=160)
    peaks = [
        [row["max_allocated_mib"] for row in measured(True, cases, tmp_path, device="cuda").rows]
        for cases in ([one, other], [other, one])
    ]
    assert peaks[0] == pytest.approx(peaks[1][::-1], rel=0.02)


@pytest.mark.gpu
def test_memory_does_not_depend_on_earlier_runs_of_the_process(tmp_path, cuda_device):
    peaks = []
    for _ in range(3):
        rows = measured(True, [case(batch_size=64)], tmp_path, device="cuda").rows
        assert rows[0]["replayed"]
        peaks.append(rows[0]["max_allocated_mib"])
    assert max(peaks) - min(peaks) < 8  # a cuBLAS workspace of a graph's stream takes 8 or 32 MiB
