"""Passes replayed as graphs give the eager run to the bit.

On a machine without a GPU a stand-in captures: it records every operator with the very tensors it
ran on, undoes what running it changed (a capture computes nothing), and replays by running the
recorded operators on those tensors again. What does not live in them, a new batch, a new gradient,
is not seen.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.engine.runs import assert_same_run
from tests.operators import Recorder
from tresnet.engine import config as configs
from tresnet.engine import prepare
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.distributed import Processes
from tresnet.engine.resolve import create_model, resolve
from tresnet.engine.train import train
from tresnet.errors import ConfigError
from tresnet.models import zoo
from tresnet.settings import TrainingCompute
from tresnet.steps import training as steps
from tresnet.steps.graph import WARMUP_PASSES, GraphedPasses
from tresnet.steps.training import check_cuda_graph

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
        with torch.no_grad():
            for function, args, kwargs, out in calls:
                returns = function._schema.returns
                if any(r.alias_info and not r.alias_info.is_write for r in returns):
                    continue  # a view of a recorded tensor
                again = function(*args, **kwargs)
                if any(r.alias_info for r in returns):
                    continue  # written in place
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


@pytest.fixture
def graphed(monkeypatch):
    """Lets `train` replay its passes; gives the stand-ins of the runs."""
    made = []
    original = prepare.create_step

    def create_step(model, *args, **kwargs):
        step = original(model, *args, **kwargs)
        made.append(StandIn(step.model))
        step.capture_with(made[-1])
        return step

    monkeypatch.setattr(prepare, "create_step", create_step)
    return made


@pytest.mark.parametrize(
    ("changes", "captures"),
    [
        ({}, 2),  # mixed batches and others have losses of their own
        ({"amp": "bf16", "mixup": 0.0, "channels_last": True, "clip_grad": 0.1}, 1),
        ({"accumulate": 2, "norm": "batchnorm", "mixup": 0.0, "amp": "fp16"}, 2),
    ],
    ids=str,
)
def test_a_run_by_graphs_is_the_eager_run_to_the_bit(tiny, graphed, monkeypatch, changes, captures):
    config = tiny(name="graphed", epochs=3, mix_off_epochs=1, mix_prob=1.0, **changes)
    found = train(config).run_dir
    (stand_in,) = graphed
    assert stand_in.captures == captures
    assert stand_in.warmups >= WARMUP_PASSES
    assert stand_in.replays > stand_in.warmups
    monkeypatch.undo()
    assert_same_run(found, train(configs.replace(config, name="eager")).run_dir)


def test_another_shape_runs_eagerly_and_leaves_the_graph_good(tiny):
    config = resolve(tiny(mixup=0.0, drop_rate=0.0, drop_path_rate=0.0))

    def run(graphs):
        torch.manual_seed(0)
        step = prepare.create_step(
            create_model(config, "abc"), config, ALONE, MicroBatches(4, 1, 20)
        )
        stand_in = StandIn(step.model)
        if graphs:
            step.capture_with(stand_in)
        losses, criterion = [], torch.nn.CrossEntropyLoss()
        for number in range(1, 12):
            size = 3 if number in (2, 7, 9) else 4
            images, labels = torch.rand(size, 3, 12, 12), torch.arange(size) % 3
            loss, logits = step.backward(images, labels, criterion)
            losses += [loss, logits.sum()]
            step.update(number)
        return torch.stack(losses), stand_in

    losses, stand_in = run(True)
    assert (stand_in.captures, stand_in.replays) == (1, 4)  # updates 6, 8, 10 and 11
    assert torch.equal(losses, run(False)[0])


def test_gradients_are_reduced_on_the_captured_stream(monkeypatch):
    """What holds on to the nodes that add gradients up is made where they are captured."""
    model, inside = torch.nn.Linear(2, 2), []

    class Watched(StandIn):
        @contextlib.contextmanager
        def warming_up(self):
            inside.append("begin")
            yield
            inside.append("end")

    class Parallel(torch.nn.Module):
        no_sync = contextlib.nullcontext

        def __init__(self, *_, **__):
            super().__init__()
            inside.append("made")

    monkeypatch.setattr(steps, "CudaCapturer", Watched)
    monkeypatch.setattr(steps, "check_cuda_graph", lambda *_: None)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Parallel)
    for graphs, expected in ((True, ["begin", "made", "end"]), (False, ["made"])):
        inside.clear()
        steps.create_training_step(model, TrainingCompute(cuda_graph=graphs), CPU, world=2)
        assert inside == expected


def test_what_no_graph_can_hold_is_refused(tiny):
    cuda = torch.device("cuda")
    for settings, device, checkpointing, message in (
        (TrainingCompute(), CPU, False, "expected a GPU, got device cpu"),
        (TrainingCompute(compile="reduce-overhead"), cuda, False, "graphs of its own"),
        (TrainingCompute(), cuda, True, "--grad-checkpointing sets random generators back"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_cuda_graph(settings, device, checkpointing)
    with pytest.raises(ConfigError, match="--cuda-graph: expected a GPU, got device cpu"):
        train(tiny(cuda_graph=True))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"amp": "bf16", "accumulate": 2}], ids=str)
def test_a_gpu_replays_what_it_runs_eagerly(tiny, changes):
    torch.backends.cudnn.deterministic = True
    shared = {"device": "cuda", "epochs": 4, "mixup": 0.0, "impl": "reference", **changes}
    found = train(tiny(name="graphed", cuda_graph=True, **shared)).run_dir
    assert_same_run(found, train(tiny(name="eager", **shared)).run_dir)


@pytest.mark.gpu
def test_data_parallel_passes_are_captured_with_their_reductions():
    weights = data_parallel_weights("cuda", "nccl", graphs=True)
    eager = data_parallel_weights("cuda", "nccl", graphs=False)
    assert all(map(torch.equal, weights, eager))


def data_parallel_weights(device, backend, graphs):
    """After 16 updates in a group of one process."""
    torch.backends.cudnn.deterministic = True
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = zoo.build("tresnet_t", width_factor=0.25, layers=(1, 1, 1, 1), impl="reference")
        compute = TrainingCompute(cuda_graph=graphs)
        step = steps.create_training_step(model, compute, torch.device(device), world=2)
        for number in range(1, 17):
            images, labels = torch.rand(4, 3, 32, 32), torch.randint(1000, (4,))
            step.backward(*step.feed(images, labels), torch.nn.functional.cross_entropy)
            step.update(number)
        return [parameter.detach().clone() for parameter in model.parameters()]
    finally:
        dist.destroy_process_group()


def test_no_more_graphs_than_memory_is_meant_for():
    """Each new criterion would otherwise be captured."""
    weight = torch.nn.Parameter(torch.ones(2))

    def run(images, targets, criterion, passes, is_last):
        loss = criterion(images * weight, targets)
        loss.backward()
        return loss.detach(), images

    stand_in = StandIn(torch.nn.ParameterList([weight]))
    passes = GraphedPasses(run, [weight], stand_in, warmup_passes=1)
    for _ in range(20):
        criterion = torch.nn.MSELoss()
        for _ in range(3):
            passes(torch.rand(2), torch.rand(2), criterion, 1, True)
            weight.grad = None
    assert stand_in.captures == 8
