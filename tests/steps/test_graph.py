"""Replayed graphs of training give the eager run to the bit; other graphs are dropped."""

import functools
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.engine.runs import assert_same_run
from tests.fused.models import RUNNERS
from tests.steps.stand_in import (
    CPU,
    Failing,
    NoRoom,
    StandIn,
    Unchanging,
    assert_eager,
    create_step,
    faulty,
    network,
    small,
    trained,
)  # fmt: skip
from tresnet.engine.train import train
from tresnet.errors import ConfigError
from tresnet.layers.norm import FrozenRunningStats
from tresnet.models import zoo
from tresnet.settings import Compute, InferenceCompute, Step, TrainingBuild
from tresnet.steps import StepHost, graph
from tresnet.steps import training as steps
from tresnet.steps.graph import EXPLAINED_AFTER, WARMUP_RUNS, uses_graph

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


@pytest.mark.parametrize(
    ("capturer", "accumulate", "reason"),
    [
        (Unchanging, 1, "outputs are off by"),
        (faulty(lambda one: one.model[1].running_var.mul_(1.1)), 1, "buffers are off by"),
        (faulty(lambda one: one.gradient.mul_(1.1)), 1, "gradients are off by"),
        (faulty(lambda one: one.gradient.mul_(1.1)), 2, "gradients are off by"),
        (Failing, 2, "RuntimeError: operation not permitted when stream is capturing"),
        (NoRoom, 2, "no memory to compare a graph with eager runs"),
    ],
)
def test_a_graph_that_differs_or_fails_is_left_and_changes_nothing(capturer, accumulate, reason):
    said, replayed = assert_eager(capturer, accumulate=accumulate)
    assert not any(replayed)
    assert len(said) == 1
    assert said[0].startswith(f"batches run eagerly, without a CUDA graph: {reason}")


def tresnet(runner="plain", **options):
    """A model with dropout and dropped paths; `runner` is one of tests.fused.models."""
    torch.manual_seed(0)
    options |= {"layers": (1, 1, 1, 2), "drop_rate": 0.2, "drop_path_rate": 0.2, "num_classes": 3}
    model = zoo.build("tresnet_t", width_factor=0.125, block_size=1, **options)
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
def test_a_right_graph_is_compared_once_and_then_replayed(keywords):
    said, replayed = assert_eager(StandIn, **keywords)
    count = keywords.get("accumulate", 1)
    graphs = min(count, 2)  # of the first micro-batch and of all others
    assert said == ["batches of 4 run as a CUDA graph, which agrees with an eager run"] * graphs
    assert all(replayed[(WARMUP_RUNS + 2) * count :])


def weighted():
    return torch.nn.CrossEntropyLoss(torch.ones(3))


CHANGES = {
    "frozen": lambda model, _: model[0].weight.requires_grad_(False),
    "attribute": lambda model, _: setattr(model[1], "momentum", 0.5),
    "criterion": lambda _, criterion: setattr(criterion, "label_smoothing", 0.5),
    "weights": lambda _, criterion: setattr(criterion, "weight", torch.arange(1.0, 4.0)),
}


def assert_captured_anew(change, **keywords):
    said, replayed = assert_eager(StandIn, change=change, **keywords)
    assert len(said) == 2
    assert replayed[7:9] == [True, False]
    assert replayed[-1]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_or_criterion_is_captured_anew(change):
    assert_captured_anew(change, make=weighted)


STATISTICS = FrozenRunningStats()
SWITCHES = {
    "tf32 products": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "exact convolutions": lambda on: setattr(torch.backends.cudnn, "allow_tf32", not on),
    "cudnn.benchmark": lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    "cudnn.deterministic": lambda on: setattr(torch.backends.cudnn, "deterministic", on),
    "deterministic algorithms": torch.use_deterministic_algorithms,
    "default dtype": lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
    "autocast": lambda on: torch.set_autocast_enabled("cuda", on),
    "autocast's dtype": lambda on: torch.set_autocast_dtype(
        "cuda", torch.bfloat16 if on else torch.float16
    ),
    "frozen statistics": lambda on: STATISTICS.__enter__() if on else STATISTICS.__exit__(),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_other_settings_of_pytorch_are_captured_anew(switch):
    try:
        _, said, replayed = trained(StandIn, change=lambda *_: switch(True))
    finally:
        switch(False)
    assert len(said) == 2
    assert replayed[7:9] == [True, False]
    assert replayed[-1]


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits, labels):
        return cross_entropy(logits * self.scale, labels)


@pytest.mark.parametrize(
    ("make", "is_replayed"),
    [
        (lambda: cross_entropy, True),
        (lambda: functools.partial(cross_entropy, weight=torch.ones(3)), True),
        (lambda: weighted().forward, True),
        (Scaled, False),
    ],
)
def test_a_criterion_without_trained_parameters_is_captured(make, is_replayed):
    _, replayed = assert_eager(StandIn, make=make)
    assert replayed[-1] == is_replayed


def run(step, criterion=cross_entropy, count=4, micro_batches=1):
    """Run the first of an optimizer step's micro-batches."""
    step.model.zero_grad()
    step.backward(torch.rand(count, 3, 8, 8), torch.randint(3, (count,)), criterion, micro_batches)


@pytest.mark.parametrize(
    ("vary", "reason"),
    [
        (lambda step, n: run(step, count=4 + n % 2), "the shape changed from batch to batch"),
        (lambda step, n: run(step, torch.nn.CrossEntropyLoss()), "the criterion changed from"),
        (lambda step, n: run(step, micro_batches=1 + n % 2), "the number of micro-batches changed"),
        (lambda step, n: torch.set_autocast_enabled("cuda", n % 2 == 0) or run(step), "a setting"),
        (lambda step, n: setattr(step.model[2], "p", n / 99) or run(step), "a value of the model"),
        (lambda step, n: step.model[0].weight.register_hook(abs) and run(step), "model or"),
    ],
)
def test_a_line_says_why_nothing_is_replayed(vary, reason):
    model, said = network(), []
    step = create_step(model, Compute())
    step.capture_with(StandIn(model), warn=said.append)
    for number in range(2 * EXPLAINED_AFTER):
        assert bool(said) == (number >= EXPLAINED_AFTER)
        vary(step, number)
    assert len(said) == 1
    assert said[0].startswith(f"50 batches have run eagerly, without a CUDA graph: {reason}")


def test_eager_runs_between_replays_need_no_reason():
    """Such as those of an epoch's smaller last batch: only consecutive ones count."""
    model, said = network(), []
    step = create_step(model, Compute())
    step.capture_with(StandIn(model), warn=said.append)
    for number in range(4 * EXPLAINED_AFTER):
        run(step, count=4 if number < 9 or number % 3 else 3)
    assert said == []


def test_another_shape_runs_eagerly_and_leaves_the_graph_good():
    _, replayed = assert_eager(StandIn, odd=(2, 7, 9, 13))  # captured in 6
    assert [n for n, one in enumerate(replayed, 1) if one] == [8, 10, 11, 12, 14, 15, 16]


def test_images_that_need_a_gradient_get_it():
    _, replayed = assert_eager(StandIn, of_images=True)
    assert not any(replayed)


def test_gradients_that_are_not_a_graphs_are_added_to_eagerly():
    def double(model, _):
        model[0].weight.grad = 2 * model[0].weight.grad

    _, replayed = assert_eager(StandIn, accumulate=2, change=double, before=2)
    assert replayed[16:19] == [True, False, True]


@pytest.mark.parametrize(
    "register",
    [
        lambda model, _: model[3].register_forward_hook,
        lambda model, _: model[3].register_full_backward_hook,
        lambda model, _: model[4].weight.register_hook,
        lambda model, _: model[4].weight.register_post_accumulate_grad_hook,
        lambda *_: torch.nn.modules.module.register_module_forward_hook,
        lambda _, criterion: criterion.register_forward_hook,
    ],
    ids=["forward", "backward", "tensor", "gradient", "global", "criterion"],
)
def test_hooks_are_called(register):
    calls, handles = [], []

    def change(*parts):
        handles.append(register(*parts)(lambda *_: calls.append(1)))

    _, replayed = assert_eager(StandIn, change=change)
    for handle in handles:
        handle.remove()
    assert replayed[7]
    assert not any(replayed[8:])
    assert len(calls) >= 2 * 8, "in both runs"


def test_a_batch_whose_gradients_are_infinite_is_not_captured():
    """In fp16, gradients are infinite until the scaler has lowered its scale."""
    scales, replayed, model = [1.0] * 3 + [torch.inf] * 2 + [1.0] * 3, [], network()
    step = create_step(model, Compute())
    step.capture_with(StandIn(model))
    criterion = lambda logits, labels: cross_entropy(logits, labels) * scale  # noqa: E731
    for scale in scales:  # noqa: B007
        run(step, criterion)
        replayed.append(step.replayed)
    assert replayed == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("error", "noise", "size", "verdict"),
    [
        (torch.nan, 0.0, 1.0, "outputs are off by nan of 1, two eager runs by 0"),
        (0.3, 0.1, 1.0, "agrees"),
        (0.5, 0.1, 1.0, "outputs are off by 0.5 of 1, two eager runs by 0.1"),
    ],
)
def test_a_replay_may_differ_by_four_times_what_two_eager_runs_do(error, noise, size, verdict):
    graphs, batch = MagicMock(), MagicMock(inputs=[[]])
    graph.Graphs._judge(graphs, batch, *({"outputs": one} for one in (size, noise, error)))
    said = [str(one.args[0]) for one in (*graphs._give_up.mock_calls, *graphs._say.mock_calls)]
    assert len(said) == 1
    assert verdict in said[0]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"amp": "bf16", "accumulate": 2}], ids=str)
def test_a_gpu_replays_what_it_runs_eagerly(tiny, changes):
    torch.backends.cudnn.deterministic = True
    shared = {"device": "cuda", "epochs": 4, "mixup": 0.0, "impl": "plain", **changes}
    graphed = train(tiny(name="graphed", cuda_graph="on", **shared)).run_dir
    assert_same_run(graphed, train(tiny(name="eager", cuda_graph="off", **shared)).run_dir)


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_gpu_replays_triton_kernels_with_their_gradients(amp):
    """The weights stay as they are: each replay's gradients are those of an eager run."""
    device, said = torch.device("cuda", 0), []
    step, eager = (
        create_step(
            small("triton"),
            Compute(cuda_graph=graphs, amp=amp, channels_last=True),
            device,
            say=said.append,
        )
        for graphs in ("on", "off")
    )
    for number in range(10):
        batch = torch.rand(4, 3, 64, 64), torch.randint(1000, (4,))
        results = []
        for one in (step, eager):
            one.model.zero_grad()
            loss, logits = one.backward(*one.feed(*batch), cross_entropy)
            results.append([loss, logits, *(p.grad.clone() for p in one.model.parameters())])
        assert step.replayed == (number > WARMUP_RUNS), said
        error = torch.stack([(a - b).norm() for a, b in zip(*results, strict=True)]).norm()
        size = torch.stack([b.norm() for b in results[1]]).norm()
        assert error <= (1e-4 if amp == "off" else 3e-2) * size
        for pair in zip(step.model.buffers(), eager.model.buffers(), strict=True):
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_process_of_nccl_replays_what_it_runs_eagerly():
    """Two eager steps differ too, because backward of `ReflectionPad2d` adds in any order."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replayed, *eager = (
            create_step(small("plain"), Compute(cuda_graph=graphs), CUDA, world_size=2)
            for graphs in ("on", "off", "off")
        )
        for number in range(10):
            batch = torch.rand(4, 3, 32, 32), torch.randint(1000, (4,))
            gradients = []
            for step in (replayed, *eager):
                step.model.zero_grad()
                step.backward(*step.feed(*batch), cross_entropy)
                gradients.append(torch.cat([p.grad.flatten() for p in step.model.parameters()]))
            assert replayed.replayed == (number > WARMUP_RUNS)
            graph_gradient, first, second = gradients
            noise, error = (first - second).norm(), (graph_gradient - first).norm()
            assert error <= 4 * noise + 1e-3 * first.norm()
    finally:
        dist.destroy_process_group()
