"""Replayed graphs of training give the eager run's bits; another part of the model drops them."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from tests.fused.models import RUNNERS
from tests.steps.stand_in import (
    CPU,
    Failing,
    StandIn,
    assert_eager,
    create_step,
    network,
    small,
)  # fmt: skip
from tests.toys import CLASSES, smallest
from tresnet.engine.train import train
from tresnet.errors import ConfigError
from tresnet.ops import epilogue, verdict
from tresnet.settings import Compute, InferenceCompute, OptimConfig, Step, TrainingBuild
from tresnet.steps import StepHost, TrainingStep
from tresnet.steps import training as steps
from tresnet.steps.graph import WARMUP_RUNS, uses_graph

CUDA = torch.device("cuda")


@pytest.mark.parametrize("kind", [Compute, InferenceCompute])
@pytest.mark.parametrize(
    ("settings", "device", "suitable", "expected"),
    [
        ({}, CPU, True, False),
        ({}, CUDA, True, True),
        ({}, CUDA, False, False),
        ({"compile": "default"}, CUDA, True, False),
        ({"cuda_graph": "off"}, CUDA, True, False),
        ({"cuda_graph": "on", "compile": "default"}, CUDA, False, True),
    ],
)
def test_auto_takes_graphs_where_they_can_be(kind, settings, device, suitable, expected):
    assert uses_graph(kind(**settings), device, suitable) == expected


def test_on_says_why_graphs_cannot_be(tiny):
    with pytest.raises(ConfigError, match=r"--cuda-graph on: .* makes graphs of its own"):
        uses_graph(Compute(cuda_graph="on", compile="reduce-overhead"), CUDA)
    with pytest.raises(ConfigError, match="--cuda-graph on: expected a GPU, got device cpu"):
        train(tiny(cuda_graph="on"))


@pytest.mark.parametrize(
    ("build", "host", "expected"),
    [
        ({}, {"world_size": 2}, True),
        ({"grad_checkpointing": True}, {}, "--grad-checkpointing sets random generators back"),
        ({}, {"sync_bn": True, "world_size": 2}, "--sync-bn exchanges statistics during forward"),
        ({}, {"sync_bn": True}, True),
        ({}, {"during": lambda phase: None}, False),
    ],
)
def test_a_step_that_a_graph_cannot_replay_is_eager_or_an_error(build, host, expected):
    def captures(cuda_graph):
        settings = Step(compute=Compute(cuda_graph=cuda_graph), build=TrainingBuild(**build))
        return steps._captures(model, settings, StepHost(device=CUDA, **host))

    norm = torch.nn.SyncBatchNorm(2) if "sync_bn" in host else torch.nn.BatchNorm2d(2)
    model = torch.nn.Sequential(norm)
    assert captures("auto") == (expected is True)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"--cuda-graph on: {expected}"):
            captures("on")


def tresnet(runner="plain", **options):
    """A model with dropout and dropped paths; `runner` is one of tests.fused.models."""
    torch.manual_seed(0)
    options |= {"layers": (1, 1, 1, 2), "drop_rate": 0.2, "drop_path_rate": 0.2}
    model = smallest(block_size=1, **options)
    model.runner = RUNNERS[runner]
    return model


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"accumulate": 3},
        {"accumulate": 2, "amp": "fp16", "build": lambda: tresnet(norm="batchnorm")},
        {"amp": "bf16", "channels_last": True, "build": functools.partial(tresnet, "definitions")},
    ],
    ids=["plain", "accumulated", "fp16", "program"],
)
def test_a_shape_is_captured_after_its_warm_up_and_then_replayed(keywords):
    said, replayed = assert_eager(StandIn, **keywords)
    accumulate = keywords.get("accumulate", 1)
    assert said == ["batches of 4 run as a CUDA graph"] * min(accumulate, 2)
    begins = -(-WARMUP_RUNS // accumulate) * accumulate  # with an optimizer step
    assert replayed == [index >= begins for index in range(16 * accumulate)]


def test_another_shape_runs_eagerly_and_leaves_the_graph_good():
    _, replayed = assert_eager(StandIn, odd=(2, 7, 9, 13))
    assert [n for n, one in enumerate(replayed, 1) if one] == [6, 8, 10, 11, 12, 14, 15, 16]


@pytest.mark.parametrize(
    "make", [lambda: cross_entropy, lambda: torch.nn.CrossEntropyLoss().forward]
)
def test_any_criterion_that_is_kept_is_captured(make):
    assert all(assert_eager(StandIn, make=make)[1][WARMUP_RUNS:])


def test_a_criterion_that_is_made_anew_is_never_captured():
    model, said = network(), []
    step = create_step(model, Compute())
    step.capture_with(StandIn(model), said.append)
    for _ in range(20):
        step.model.zero_grad()
        labels = torch.randint(3, (4,))
        step.backward(torch.rand(4, 3, 8, 8), labels, lambda x, y: cross_entropy(x, y))
    assert said == []


def other_parameter(step):
    old, new = step.model[4].weight, torch.nn.Parameter(torch.rand_like(step.model[4].weight))
    step.model[4].weight = new
    for group in step.optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def other_memory(step):
    weight = step.model[4].weight
    weight.data = weight.data.clone()


CHANGES = {
    "parameter": other_parameter,
    "memory of a parameter": other_memory,
    "buffer": lambda step: setattr(step.model[1], "running_mean", step.model[1].running_mean + 1),
    "module": lambda step: step.model.__setitem__(2, torch.nn.Dropout(0.5)),
    "longer": lambda step: step.model.append(torch.nn.Softplus()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_another_part_of_the_model_drops_the_graph(change, accumulate):
    said, replayed = assert_eager(
        StandIn, change=lambda step, _: change(step), accumulate=accumulate
    )
    assert said == ["batches of 4 run as a CUDA graph"] * 2 * accumulate
    after, begins = replayed[8 * accumulate :], -(-WARMUP_RUNS // accumulate) * accumulate
    assert replayed[8 * accumulate - 1]
    assert after == [index >= begins for index in range(len(after))]


def test_the_same_values_in_the_same_memory_keep_the_graph():
    def load(step, _):
        step.load_state_dict(step.state_dict())

    assert all(assert_eager(StandIn, change=load)[1][WARMUP_RUNS:])


def test_graphs_dropped_by_hand_are_captured_anew():
    """Without the call, replays would not know that a parameter is frozen."""

    def freeze(step, _):
        step.model[0].weight.requires_grad_(False)
        assert step.drop_graphs() == (step._graphs is not None)

    said, replayed = assert_eager(StandIn, change=freeze)
    assert said == ["batches of 4 run as a CUDA graph"] * 2
    assert replayed[7:12] == [True, False, False, False, True]


def test_images_that_need_a_gradient_get_it():
    _, replayed = assert_eager(StandIn, of_images=True)
    assert not any(replayed)


def test_gradients_that_are_not_a_graphs_are_added_to_eagerly():
    def double(step, _):
        step.model[0].weight.grad = 2 * step.model[0].weight.grad

    _, replayed = assert_eager(StandIn, accumulate=2, change=double, before=2)
    assert replayed[16:19] == [True, False, True]


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits, labels):
        return cross_entropy(logits * self.scale, labels)


class NoMemory(StandIn):
    def capture(self, function):
        super().capture(function)
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")


def hooked(register):
    """Return a function that builds a model whose hook counts its calls."""

    def build():
        model = network()
        model.calls = []
        register(model)(lambda *_: model.calls.append(1))
        return model

    return build


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"capturer": Failing}, "RuntimeError: operation not permitted when stream is capturing"),
        ({"capturer": NoMemory}, "OutOfMemoryError: CUDA out of memory"),
        ({"make": Scaled}, "InputError: the criterion has parameters to train"),
        *[
            ({"build": hooked(register)}, "InputError: the model or the criterion has hooks")
            for register in (
                lambda model: model[3].register_forward_hook,
                lambda model: model[3].register_full_backward_hook,
                lambda model: model[4].weight.register_hook,
                lambda model: model[4].weight.register_post_accumulate_grad_hook,
            )
        ],
    ],
)  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_capture_that_fails_changes_nothing_and_says_why(keywords, reason, accumulate):
    said, replayed = assert_eager(**{"capturer": StandIn, "accumulate": accumulate, **keywords})
    assert not any(replayed)
    assert said == [f"batches run eagerly, without a CUDA graph: {reason}"]


def test_hooks_are_called_in_every_run():
    models = []

    def build():
        models.append(hooked(lambda model: model[3].register_forward_hook)())
        return models[-1]

    assert_eager(StandIn, build=build)
    assert [len(model.calls) for model in models] == [16, 16]


def test_hooks_of_all_modules_and_of_the_criterion_are_read_at_capture():
    def make():
        criterion = torch.nn.CrossEntropyLoss()
        criterion.register_forward_hook(lambda *_: None)
        return criterion

    assert not any(assert_eager(StandIn, make=make)[1])
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not any(assert_eager(StandIn)[1])
    finally:
        handle.remove()


def test_a_capture_is_the_only_run_of_the_model_beside_the_warm_up():
    model, runs = network(), []
    step = create_step(model, Compute())
    step.capture_with(StandIn(model))
    forward = model.forward
    model.forward = lambda x: runs.append(len(x)) or forward(x)
    for _ in range(WARMUP_RUNS + 5):
        step.backward(torch.rand(4, 3, 8, 8), torch.randint(3, (4,)), cross_entropy)
        step.optimizer.zero_grad()
    assert runs == [4] * (WARMUP_RUNS + 1)


# -- on a GPU ---------------------------------------------------------------------------------

CASES = {
    "fp32": {"amp": "off"},
    "bf16": {"amp": "bf16"},
    "fp16": {"amp": "fp16"},
    "accumulated": {"amp": "bf16", "accumulate": 3, "clip_grad": 0.1},
    "accumulated in fp16": {"amp": "fp16", "accumulate": 2},
    "kernels": {"amp": "bf16", "impl": "triton"},
    "kernels in fp16": {"amp": "fp16", "impl": "triton", "accumulate": 2},
    "two processes' step": {"amp": "bf16", "world_size": 2},
}


def assert_replays_are_eager(amp, accumulate=1, clip_grad=None, impl="plain", world_size=1):
    """Compare each micro-batch of a replaying step with those of two eager steps.

    Two eager steps differ too, because backward of `ReflectionPad2d` adds in any order. All three
    draw equal random numbers, and get the same weights after each optimizer step. The sixth step's
    batches are smaller; the eighth's are infinite, so that fp16 skips the step.
    """
    replaying, *eager = (
        TrainingStep(
            small(impl, drop_rate=0.2, drop_path_rate=0.2),
            Step(
                compute=Compute(amp=amp, cuda_graph=graphs),
                optim=OptimConfig(accumulate=accumulate, clip_grad=clip_grad),
            ),
            StepHost(device=CUDA, world_size=world_size),
        )
        for graphs in ("on", "off", "off")
    )
    replayed = []
    for number in range(1, 13):
        for part in range(accumulate):
            images = torch.rand(3 if number == 6 else 4, 3, 64, 64)
            images *= torch.inf if amp == "fp16" and number == 8 else 1
            labels, is_last = torch.randint(CLASSES, (len(images),)), part == accumulate - 1
            results = []
            for step in (replaying, *eager):
                torch.cuda.manual_seed(number)
                batch = step.feed(images, labels)
                values = step.backward(*batch, cross_entropy, accumulate, is_last)
                values += tuple(parameter.grad for parameter in step.model.parameters())
                values += tuple(b.double() for b in step.model.buffers())
                results.append(torch.cat([value.flatten().double() for value in values]))
            replayed.append(replaying.replayed)
            graphed, first, second = (x.nan_to_num(0, 0, 0) for x in results)
            noise, error = (first - second).norm(), (graphed - first).norm()
            assert error <= 4 * noise + 1e-3 * first.norm(), (number, part)
            finite = [x.isfinite() for x in results]
            assert torch.equal(finite[0], finite[1])
        for step in (replaying, *eager):
            step.optimizer_step(number)
        assert replaying.scaler.get_scale() == eager[0].scaler.get_scale()
        for step in (replaying, eager[1]):
            step.model.load_state_dict(eager[0].model.state_dict())
    assert replayed[-3 * accumulate :] == [True] * 3 * accumulate
    assert replayed[5 * accumulate : 6 * accumulate] == [False] * accumulate


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_replays_what_it_runs_eagerly(case):
    if "world_size" in CASES[case]:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_replays_are_eager(**CASES[case])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.gpu
def test_a_process_of_nccl_replays_beside_a_stage_whose_kernel_is_wrong(monkeypatch):
    """The first use makes the stage plain; the gradients are those of plain modules."""
    monkeypatch.setattr(verdict, "_verdicts", {})
    forward, width = epilogue.forward, small("plain").body.layer3[0].conv1.bn.weight.numel()

    def wrong(maps, *args, **kwargs):
        results = forward(maps, *args, **kwargs)
        if maps.shape[1] != width:
            return results
        return tree_map(lambda x: x * 1.1 if isinstance(x, torch.Tensor) else x, results)

    monkeypatch.setattr(epilogue, "forward", wrong)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replaying, plain = (
            TrainingStep(
                small(impl),
                Step(compute=Compute(amp="off", cuda_graph=graphs)),
                StepHost(device=CUDA, world_size=2),
            )
            for impl, graphs in (("auto", "on"), ("plain", "off"))
        )

        def compare(replays):
            images, labels, results = torch.rand(4, 3, 64, 64), torch.randint(CLASSES, (4,)), []
            for step in (replaying, plain):
                step.backward(*step.feed(images, labels), cross_entropy)
                values = [parameter.grad.flatten() for parameter in step.model.parameters()]
                results.append(torch.cat(values))
                step.optimizer.zero_grad()
            assert replaying.replayed == replays
            assert (results[0] - results[1]).norm() <= 1e-3 * results[1].norm()

        with pytest.warns(UserWarning, match="layer3 runs as plain modules: its first use"):
            compare(False)
        for number in range(1, WARMUP_RUNS + 3):
            compare(number >= WARMUP_RUNS)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_capture_in_trouble_leaves_the_run_as_it_was():
    """The criterion reads a number back from its fourth run on; another thread pins memory."""
    said, runs, stop = [], [], threading.Event()

    def criterion(logits, labels):
        runs.append(len(logits))
        loss = cross_entropy(logits, labels)
        if len(runs) > WARMUP_RUNS:
            loss.item()
        return loss

    def pin():
        while not stop.is_set():
            torch.empty(2**20).pin_memory()

    def results(cuda_graph, criterion):
        step = create_step(network(), Compute(cuda_graph=cuda_graph), CUDA, warn=said.append)
        torch.manual_seed(1)
        torch.cuda.manual_seed(1)
        values = []
        for number in range(1, 9):
            batch = step.feed(torch.rand(4, 3, 8, 8), torch.randint(3, (4,)))
            values += step.backward(*batch, criterion)
            step.optimizer_step(number)
        return step.replayed, [*values, *step.model.state_dict().values()]

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        outcomes = [results("on", criterion), *(results(x, cross_entropy) for x in ("on", "off"))]
    finally:
        stop.set()
        thread.join()
    assert [replayed for replayed, _ in outcomes] == [False, True, False]
    assert len(said) == 1
    assert said[0].startswith("batches run eagerly, without a CUDA graph: ")
    for _, values in outcomes[:2]:
        for value, expected in zip(values, outcomes[2][1], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5)
