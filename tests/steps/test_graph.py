"""Passes replayed as graphs give the eager run to the bit, and what does not goes on eagerly.

On a machine without a GPU a stand-in captures: it records every operator with the very tensors it
ran on, undoes what running it changed (a capture computes nothing), and replays by running the
recorded operators on those tensors again. What does not live in them, a new batch, a new gradient,
is not seen.
"""

import contextlib
import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY, MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from tests.engine.runs import assert_same_run
from tests.operators import Recorder
from tresnet.engine.distributed import Processes
from tresnet.engine.train import train
from tresnet.errors import ConfigError
from tresnet.layers.norm import FrozenRunningStats
from tresnet.models import zoo
from tresnet.settings import Compute, InferenceCompute
from tresnet.steps import InferenceStep, graph
from tresnet.steps import training as steps
from tresnet.steps.graph import CHECKED_AFTER, WARMUP_RUNS, uses_graph

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)


class StandIn:
    def __init__(self, model):
        self.model = model
        self.captures = self.replays = self.warmups = 0

    @contextlib.contextmanager
    def warming_up(self):
        self.warmups += 1
        yield

    def in_turn(self):
        return contextlib.nullcontext()

    def same_random_numbers(self):
        return torch.random.fork_rng([])

    def capture(self, function):
        self.captures += 1
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        state = [*self.model.buffers(), *gradients]
        kept = [t.clone() for t in state]
        generator = torch.get_rng_state()
        with Recorder() as recorder:
            found = function()
        torch.set_rng_state(generator)
        with torch.no_grad():
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
        return found, lambda: self.replay(recorder.calls)

    def replay(self, calls):
        self.replays += 1
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, args, kwargs, out in calls:
                returns = function._schema.returns
                if any(r.alias_info and not r.alias_info.is_write for r in returns) and (
                    tree_leaves(out)[0].untyped_storage()._cdata == args[0].untyped_storage()._cdata
                ):
                    continue  # a view of a recorded tensor
                again = function(*args, **kwargs)
                if any(r.alias_info and r.alias_info.is_write for r in returns):
                    continue  # written in place
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


def create_step(model, compute, device=CPU, **host):
    spec, place = steps.StepSpec(compute=compute), steps.StepHost(device=device, **host)
    return steps.create_training_step(model, spec, place)


@pytest.mark.parametrize("graphs", ["on", "auto"])
def test_gradients_are_reduced_on_the_captured_stream(monkeypatch, graphs):
    """What holds on to the nodes that add gradients up is made where they are captured."""
    made = MagicMock()
    made.uses_graph.return_value = graphs == "on"
    monkeypatch.setattr(steps, "CudaCapturer", lambda device: made)
    monkeypatch.setattr(steps, "uses_graph", made.uses_graph)
    monkeypatch.setattr(steps, "Graphs", made.graphs)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", made.parallel)
    compute, model = Compute(cuda_graph=graphs), torch.nn.Linear(2, 2)
    create_step(model, compute, world_size=2, say=print)
    made.uses_graph.assert_called_once_with(compute, CPU, False)  # auto: not in several processes
    _, *names = [call[0] for call in made.mock_calls]
    around = ["warming_up().__enter__", "parallel", "warming_up().__exit__", "graphs"]
    assert names == (["warming_up", *around] if graphs == "on" else ["parallel"])
    if graphs == "on":
        options = {"trains": True, "warmup_runs": 11, "agree": ANY, "say": print}
        made.graphs.assert_called_once_with(model, made, **options)
    # else every gradient is kept twice
    made.parallel.assert_called_once_with(model, None, gradient_as_bucket_view=True)


CUDA = torch.device("cuda")


@pytest.mark.parametrize("kind", [Compute, InferenceCompute])
@pytest.mark.parametrize(
    ("settings", "device", "captures", "expected"),
    [
        ({}, CPU, True, False),
        ({}, CUDA, True, True),
        ({}, CUDA, False, False),
        ({"compile": "default"}, CUDA, True, False),
        ({"cuda_graph": "off"}, CUDA, True, False),
        ({"cuda_graph": "on", "compile": "default"}, CUDA, False, True),
    ],
)
def test_auto_takes_graphs_where_they_can_be(kind, settings, device, captures, expected):
    assert uses_graph(kind(**settings), device, captures) == expected


def test_on_says_why_graphs_cannot_be(tiny, monkeypatch):
    with pytest.raises(ConfigError, match=r"--cuda-graph on: .* makes graphs of its own"):
        uses_graph(Compute(cuda_graph="on", compile="reduce-overhead"), CUDA)
    with pytest.raises(ConfigError, match="--cuda-graph on: expected a GPU, got device cpu"):
        train(tiny(cuda_graph="on"))
    monkeypatch.setattr(steps, "uses_graph", lambda *_: True)
    with pytest.raises(ConfigError, match="--grad-checkpointing sets random generators back"):
        steps.create_training_step(
            torch.nn.Linear(2, 2),
            steps.StepSpec(compute=Compute(), grad_checkpointing=True),
            steps.StepHost(device=CPU),
        )


def network():
    """Convolution, norm and dropout: buffers, gradients and random numbers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.2),
        torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3),
    )  # fmt: skip


def trained(
    capturer=None, accumulate=1, change=None, before=1, agree=None, make=torch.nn.CrossEntropyLoss,
    of_images=False, odd=(), build=network, **settings,
):  # fmt: skip
    """Losses, weights and buffers after 16 optimizer steps, model and criterion changed before a
    micro-batch of the ninth; what was said, and whether each micro-batch was replayed."""
    model, said, criterion = build(), [], make()
    torch.manual_seed(1)
    step = create_step(model, Compute(**settings))
    if capturer is not None:
        step.capture_with(capturer(model), agree=agree, say=said.append)
    found, replayed = [], []
    for number in range(1, 17):
        for part in range(1, accumulate + 1):
            if change is not None and (number, part) == (9, before):
                change(model, criterion)
            count = 3 if number in odd else 4
            images = torch.rand(count, 3, 8, 8).requires_grad_(of_images)
            labels = torch.randint(3, (count,))
            batch = step.feed(images, labels)
            found += step.backward(*batch, criterion, accumulate, part == accumulate)
            found += [images.grad] if of_images else []
            replayed.append(step.replayed)
        step.optimizer_step(number)
    return [*found, *model.state_dict().values()], said, replayed


def assert_eager(capturer, **keywords):
    """Whatever a capturer does wrong, the run is the eager run; gives what was said."""
    found, said, replayed = trained(capturer, **keywords)
    keywords.pop("agree", None)
    for tensor, expected in zip(found, trained(**keywords)[0], strict=True):
        assert torch.equal(tensor, expected)
    return said, replayed


class Unchanging(StandIn):
    """Its replays leave the captured batch's results: right for that batch alone."""

    def replay(self, calls):
        pass


def scaled(part):
    """A capturer whose replays change one of their results."""

    class Scaled(StandIn):
        def capture(self, function):
            captured = super().capture(function)
            self.gradient = self.model[0].weight.grad
            return captured

        def replay(self, calls):
            super().replay(calls)
            with torch.no_grad():
                part(self).mul_(1.1)

    return Scaled


class Failing(StandIn):
    def capture(self, function):
        super().capture(function)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class NoRoom(StandIn):
    def replay(self, calls):
        super().replay(calls)
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("capturer", "accumulate", "reason"),
    [
        (Unchanging, 1, "outputs are off by"),
        (scaled(lambda one: one.model[1].running_var), 1, "buffers are off by"),
        (scaled(lambda one: one.gradient), 1, "gradients are off by"),
        (scaled(lambda one: one.gradient), 2, "gradients are off by"),
        (Failing, 2, "RuntimeError: operation not permitted when stream is capturing"),
        (NoRoom, 2, "no memory for a graph beside an eager run"),
    ],
)
def test_a_graph_that_differs_or_fails_is_left_and_changes_nothing(capturer, accumulate, reason):
    said, replayed = assert_eager(capturer, accumulate=accumulate)
    assert not any(replayed)
    assert len(said) == 1
    assert said[0].startswith(f"runs eagerly, without a CUDA graph: {reason}")


def test_a_failed_capture_leaves_stream_generator_and_pool_as_before(monkeypatch):
    """PyTorch's own parts are stood in for: they raise when the capture is ended."""
    cuda = Mock()
    cuda.Stream.return_value.device = torch.device("cuda", 3)
    cuda.default_generators = {3: cuda.generator}
    cuda.stream.return_value = MagicMock()
    cuda.graph.return_value = MagicMock()
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("capture was invalidated")
    cuda.end.side_effect = RuntimeError("not recording to this pool")
    names = ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "default_generators")
    for name in (*names, "stream", "current_stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end, raising=False)
    capturer = graph.CudaCapturer(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="capture was invalidated"):
        capturer.capture(lambda: None)
    cuda.generator.graphsafe_set_state.assert_called_once_with(
        cuda.generator.clone_state.return_value
    )
    cuda.end.assert_called_once_with(3, cuda.graph_pool_handle.return_value)
    cuda.stream.assert_called_once_with(cuda.current_stream.return_value)
    assert cuda.stream.return_value.__exit__.called
    cuda.graph.return_value.__exit__.side_effect = None
    cuda.graph.return_value.__exit__.return_value = None
    found, replay = capturer.capture(lambda: "found")
    assert (found, replay) == ("found", cuda.CUDAGraph.return_value.replay)
    with capturer.warming_up(), capturer.in_turn():
        cuda.current_stream.return_value.wait_event.assert_called_once()
    cuda.current_stream.return_value.wait_stream.assert_called_once_with(cuda.Stream.return_value)


def test_processes_decide_together():
    said, replayed = assert_eager(StandIn, agree=lambda holds: False)
    assert not any(replayed)
    assert said == ["runs eagerly, without a CUDA graph: it differed in another process"]
    with pytest.raises(RuntimeError, match="not permitted"):
        trained(Failing, agree=bool)


def tresnet(**options):
    """Run by the GPU's program where `impl` is "reference", with dropout and dropped paths."""
    torch.manual_seed(0)
    options |= {"layers": (1, 1, 1, 2), "drop_rate": 0.2, "drop_path_rate": 0.2, "num_classes": 3}
    return zoo.build("tresnet_t", width_factor=0.125, block_size=1, **options)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 2, "amp": "fp16", "build": lambda: tresnet(norm="batchnorm")},
        {
            "amp": "bf16",
            "channels_last": True,
            "build": functools.partial(tresnet, impl="reference"),
        },
    ],
    ids=["plain", "accumulated", "fp16", "program"],
)
def test_a_right_graph_is_compared_once_and_then_replayed(keywords):
    said, replayed = assert_eager(StandIn, **keywords)
    count = keywords.get("accumulate", 1)
    assert said == ["replays batches of 4 as a CUDA graph, equal to an eager run"] * count
    assert all(replayed[(WARMUP_RUNS + CHECKED_AFTER + 1) * count :])


def freeze(model, _):
    model[0].weight.requires_grad_(False)


def move(model, _):
    model[4].weight.data = model[4].weight.data.clone()


def replace(model, _):
    model[1].running_mean = model[1].running_mean + 1


def still(model, _):
    model[1].momentum = 0.5


def smooth(_, criterion):
    criterion.label_smoothing = 0.5


def weigh(_, criterion):
    criterion.weight = torch.arange(1.0, 4.0)


def weighted():
    return torch.nn.CrossEntropyLoss(torch.ones(3))


@pytest.mark.parametrize("change", [freeze, move, replace, still, smooth, weigh])
def test_a_changed_model_or_criterion_is_captured_anew(change):
    said, replayed = assert_eager(StandIn, change=change, make=weighted)
    assert len(said) == 2
    assert replayed[7]
    assert not replayed[8]
    assert replayed[-1]


ONES, STATISTICS = torch.ones(3), FrozenRunningStats()
SWITCHES = {
    "tf32 products": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "exact convolutions": lambda on: setattr(torch.backends.cudnn, "allow_tf32", not on),
    "cudnn.benchmark": lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    "cudnn.deterministic": lambda on: setattr(torch.backends.cudnn, "deterministic", on),
    "deterministic algorithms": torch.use_deterministic_algorithms,
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


def hooked():
    criterion = torch.nn.CrossEntropyLoss()
    criterion.register_forward_hook(lambda *_: None)
    return criterion


def closed():
    loss = torch.nn.CrossEntropyLoss()
    return lambda logits, labels: loss(logits, labels)


@pytest.mark.parametrize(
    ("make", "captured"),
    [
        (lambda: cross_entropy, True),
        (lambda: functools.partial(cross_entropy, label_smoothing=0.1), True),
        (lambda: functools.partial(cross_entropy, weight=torch.ones(3)), False),
        (lambda: lambda x, y, *, weights=ONES: cross_entropy(x, y, weights), False),
        (lambda: lambda x, y, weights=ONES: cross_entropy(x, y, weights), False),
        (lambda: weighted().forward, False),
        *((make, False) for make in (closed, Scaled, hooked)),
    ],
)
def test_only_a_criterion_that_cannot_change_unseen_is_captured(make, captured):
    said, replayed = assert_eager(StandIn, make=make)
    assert replayed[-1] == captured
    assert len(said) == 1
    assert captured or "expected a criterion that is a module without hooks" in said[0]


def test_a_hook_on_the_criterion_is_called():
    calls = []

    def change(_, criterion):
        criterion.register_forward_hook(lambda *_: calls.append(1))

    _, replayed = assert_eager(StandIn, change=change)
    assert replayed[7]
    assert not any(replayed[8:])
    assert len(calls) == 2 * 8


def test_another_shape_runs_eagerly_and_leaves_the_graph_good():
    _, replayed = assert_eager(StandIn, odd=(2, 7, 9, 13))  # captured in 6, compared in 8
    assert [number for number, one in enumerate(replayed, 1) if one] == [10, 11, 12, 14, 15, 16]


def test_images_that_need_a_gradient_get_it():
    _, replayed = assert_eager(StandIn, of_images=True)
    assert not any(replayed)


def double(model, _):
    model[0].weight.grad = 2 * model[0].weight.grad


def test_gradients_that_are_not_a_graphs_are_added_to_eagerly():
    _, replayed = assert_eager(StandIn, accumulate=2, change=double, before=2)
    assert replayed[16:19] == [True, False, True]


@pytest.mark.parametrize(
    "register",
    [
        lambda model, hook: model[3].register_forward_hook(hook),
        lambda model, hook: model[3].register_full_backward_hook(hook),
        lambda model, hook: model[4].weight.register_hook(hook),
        lambda model, hook: model[4].weight.register_post_accumulate_grad_hook(hook),
        lambda _, hook: torch.nn.modules.module.register_module_forward_hook(hook),
    ],
    ids=["forward", "backward", "tensor", "gradient", "global"],
)
def test_hooks_are_called(register):
    calls, handles = [], []
    _, replayed = assert_eager(
        StandIn,
        change=lambda model, _: handles.append(register(model, lambda *_: calls.append(1) or None)),
    )
    for handle in handles:
        handle.remove()
    assert replayed[7]
    assert not any(replayed[8:])
    assert len(calls) >= 2 * 8, "in both runs"


def test_scripted_models_have_graphs_too():
    (eager, _) = inference()
    step = InferenceStep(torch.jit.script(network()), InferenceCompute(fold=False), CPU)
    stand_in = StandIn(step.model)
    step.capture_with(stand_in, lambda line: None)
    for _ in range(6):
        images = torch.rand(4, 3, 8, 8)
        torch.testing.assert_close(step(images), eager(images))
    assert step.replayed
    assert stand_in.warmups == 1, "other results belong to the caller's stream"


def test_numbers_that_are_not_finite_decide_nothing():
    inf, nan, one, near, far = ([torch.tensor(x)] for x in (torch.inf, torch.nan, 1.0, 1.1, 1.5))
    assert graph._difference("x", inf, inf, inf) == graph._UNKNOWN
    assert "off by nan" in graph._difference("x", nan, one, one)
    assert graph._difference("x", [torch.tensor(1.3)], near, one) is None
    assert "two eager runs by 0.1" in graph._difference("x", far, near, one)
    assert graph._difference("x", one * 2, one, one) == "x: 2 tensors in place of 1"


def inference(capturer=None, **compute):
    step = InferenceStep(copy.deepcopy(network()), InferenceCompute(fold=False, **compute), CPU)
    said = []
    if capturer is not None:
        step.capture_with(capturer(step.model), said.append)
    return step, said


@pytest.mark.parametrize("compute", [{}, {"dtype": "bf16"}, {"amp": "bf16"}], ids=str)
def test_inference_by_graphs_gives_the_eager_logits(compute):
    """One graph a layout; the odd batch between runs eagerly, and outputs are the caller's own."""
    (graphed, said), (eager, _) = inference(StandIn, **compute), inference(**compute)
    outputs, expected, replayed = [], [], []
    for number in range(14):
        images = torch.rand(3 if number == 9 else 4, 3, 8, 8)
        if number % 2:
            images = images.contiguous(memory_format=torch.channels_last)
        outputs.append(graphed(graphed.feed.images(images)))
        expected.append(eager(eager.feed.images(images)))
        replayed.append(graphed.replayed)
    assert all(map(torch.equal, outputs, expected))
    assert said == ["replays batches of 4 as a CUDA graph, equal to an eager run"] * len(said)
    assert len(said) == 1, "the feed gives all one layout"
    assert replayed == [False] * 5 + [True] * 4 + [False] + [True] * 4


@pytest.mark.parametrize("capturer", [Unchanging, Failing, NoRoom])
def test_a_graph_of_inference_that_differs_or_fails_is_left(capturer):
    (graphed, said), (eager, _) = inference(capturer), inference()
    for images in torch.rand(8, 4, 3, 8, 8):
        assert torch.equal(graphed(images), eager(images))
    assert (len(said), graphed.replayed) == (1, False)


def test_threads_use_a_graph_one_at_a_time():
    graphed, _ = inference(StandIn)
    batches = [torch.full((4, 3, 8, 8), value / 8) for value in range(8)]
    expected = [inference()[0](images) for images in batches]
    together = threading.Barrier(8)

    def work(images):
        together.wait()
        return [graphed(images) for _ in range(6)]

    with ThreadPoolExecutor(8) as threads:
        for outputs, value in zip(threads.map(work, batches), expected, strict=True):
            assert all(torch.equal(output, value) for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"amp": "bf16", "accumulate": 2}], ids=str)
def test_a_gpu_replays_what_it_runs_eagerly(tiny, changes):
    torch.backends.cudnn.deterministic = True
    shared = {"device": "cuda", "epochs": 4, "mixup": 0.0, "impl": "reference", **changes}
    found = train(tiny(name="graphed", cuda_graph="on", **shared)).run_dir
    assert_same_run(found, train(tiny(name="eager", cuda_graph="off", **shared)).run_dir)


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_gpu_replays_triton_kernels_with_their_gradients(amp):
    """The weights stay as they are: each replay's gradients are those of an eager run."""
    device, said = torch.device("cuda", 0), []
    torch.manual_seed(0)
    model = zoo.build("tresnet_t", width_factor=0.25, layers=(1, 1, 1, 1), impl="triton")
    compute = Compute(cuda_graph="on", amp=amp, channels_last=True)
    step = create_step(model, compute, device, say=said.append)
    other = copy.deepcopy(model)
    eager = create_step(other, Compute(cuda_graph="off", amp=amp, channels_last=True), device)
    for number in range(10):
        batch = torch.rand(4, 3, 64, 64), torch.randint(1000, (4,))
        results = []
        for one in (step, eager):
            one.model.zero_grad()
            loss, logits = one.backward(*one.feed(*batch), cross_entropy)
            results.append([loss, logits, *(p.grad.clone() for p in one.model.parameters())])
        assert step.replayed == (number >= WARMUP_RUNS + CHECKED_AFTER), said
        error = torch.stack([(a - b).norm() for a, b in zip(*results, strict=True)]).norm()
        size = torch.stack([b.norm() for b in results[1]]).norm()
        assert error <= (1e-4 if amp == "off" else 3e-2) * size
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, other.get_buffer(name), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_gpu_replays_inference(impl):
    device = torch.device("cuda", 0)
    model = zoo.build("tresnet_t", width_factor=0.25, layers=(1, 1, 1, 1), impl=impl)
    steps_of = [
        InferenceStep(copy.deepcopy(model), InferenceCompute(cuda_graph=way), device)
        for way in ("on", "off")
    ]
    for number in range(8):
        images = torch.rand(2, 3, 64, 64)
        found, expected = (step(step.feed.images(images)) for step in steps_of)
        torch.testing.assert_close(found, expected)
        assert steps_of[0].replayed == (number >= WARMUP_RUNS + CHECKED_AFTER)


@pytest.mark.gpu
def test_data_parallel_micro_batches_are_captured_with_reductions():
    """Weights after 18 optimizer steps in a group of one process."""
    torch.backends.cudnn.deterministic = True
    weights = []
    for graphs in ("on", "off"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            model = zoo.build("tresnet_t", width_factor=0.25, layers=(1, 1, 1, 1), impl="reference")
            compute = Compute(cuda_graph=graphs)
            step = create_step(model, compute, torch.device("cuda"), world_size=2)
            for number in range(1, 19):
                images, labels = torch.rand(4, 3, 32, 32), torch.randint(1000, (4,))
                step.backward(*step.feed(images, labels), cross_entropy)
                step.optimizer_step(number)
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        finally:
            dist.destroy_process_group()
    assert all(map(torch.equal, *weights))


def test_no_more_graphs_than_memory_is_meant_for():
    graphed, said = inference(StandIn)
    for size in range(1, 12):
        for _ in range(5):
            graphed(torch.rand(size, 3, 8, 8))
    replays = [f"replays batches of {n} as a CUDA graph, equal to an eager run" for n in range(9)]
    assert said[:-2] == replays[1:8]
    assert said[-2].startswith("has captured 8 CUDA graphs, as many as it may: other shapes and")
    assert said[-1] == replays[8]
