"""Processes that replay graphs end with the bits of DistributedDataParallel, and end together."""

import datetime
import os
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from tests.forks import SERVER
from tests.steps.stand_in import CPU, Failing, StandIn, network, small
from tresnet.errors import InputError
from tresnet.settings import Compute, EmaConfig, OptimConfig, ScheduleConfig, Step
from tresnet.steps import StepHost, TrainingStep
from tresnet.steps import flat_gradients as flat
from tresnet.steps import training as steps

STEPS = 9
CASES = {
    "plain": {},
    "accumulated": {"accumulate": 3, "clip_grad": 0.1},
    "scaled": {"amp": "fp16", "opt": "adamw"},
    "eager on one": {"accumulate": 2},
    "skipped": {"bad": 7},
    "thawed": {"parts": ("head",), "opt": "adamw"},
}


def create(
    capturer=None, accumulate=1, clip_grad=None, amp="off", opt="sgd", bad=None, parts=None
):  # fmt: skip
    """Create a step that replays what `capturer` captures, or one of DistributedDataParallel."""
    model = network() if parts is None else small("plain", num_classes=3)
    with pytest.MonkeyPatch.context() as patch:
        if capturer is not None:
            patch.setattr(steps, "CudaCapturer", lambda device: capturer(model))
            patch.setattr(steps, "uses_graph", lambda *_: True)
        settings = Step(
            compute=Compute(amp=amp),
            optim=OptimConfig(
                accumulate=accumulate, clip_grad=clip_grad, opt=opt, train_only=parts
            ),
            ema=EmaConfig(ema_decay=0.5),
        )
        host = StepHost(
            device=CPU,
            world_size=2,
            schedule=ScheduleConfig(epochs=1),
            total_steps=STEPS,
            skips=bad is not None,
        )
        return TrainingStep(model, settings, host)


def trained(rank, step, accumulate=1, bad=None, parts=None, **_):
    """Train on batches of the rank's own; return the final state, and which steps were replayed."""
    torch.manual_seed(rank)
    replayed = []
    side = 8 if parts is None else 12
    for number in range(1, STEPS + 1):
        if parts is not None and number == 4:
            step.train_only(("layer3", "layer4", "head"))
        for part in range(1, accumulate + 1):
            images, labels = torch.rand(4, 3, side, side), torch.randint(3, (4,))
            if (rank, number) == (1, bad):
                images *= torch.inf
            step.backward(*step.feed(images, labels), cross_entropy, accumulate, part == accumulate)
        replayed.append(step.replayed)
        if bad is not None and step.is_bad():
            step.skip()
        else:
            step.optimizer_step(number)
    return step.state_dict(), replayed


def join(rank, folder, timeout_s=60):
    timeout = datetime.timedelta(seconds=timeout_s)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timeout)


def train_cases(rank, folder):
    join(rank, folder)
    results = {}
    for name, case in CASES.items():
        capturer = Failing if name == "eager on one" and rank == 1 else StandIn
        results[name] = [trained(rank, create(c, **case), **case) for c in (None, capturer)]
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    end(folder, train_cases)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def end(folder, action, *arguments):
    """Run `action` in two processes; return their exit codes and how long the first one ran."""
    began_s = time.monotonic()
    children = [SERVER.Process(target=action, args=(r, folder, *arguments)) for r in (0, 1)]
    for child in children:
        child.start()
    children[0].join()
    elapsed_s = time.monotonic() - began_s
    children[1].join()
    return [child.exitcode for child in children], elapsed_s


def tensors_of(state):
    """Return all tensors by name, and the running statistics apart."""
    tensors, statistics = {}, {}
    momenta = {
        f"{key} {name}": torch.as_tensor(value)
        for key, values in state["optimizer"]["state"].items()
        for name, value in values.items()
    }
    for prefix, values in (("model", state["model"]), ("ema", state["model_ema"]), ("", momenta)):
        for name, value in values.items():
            group = statistics if "running_" in name else tensors
            group[f"{prefix} {name}"] = value
    return tensors, statistics


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_weights_of_distributed_data_parallel(results, case):
    states = []
    for rank, (expected, ended) in enumerate(result[case] for result in results):
        assert ended[1][-3:] == [(rank, case) != (1, "eager on one")] * 3
        assert not any(expected[1])
        states.append([tensors_of(state) for state in (expected[0], ended[0])])
        assert ended[0]["scaler"] == expected[0]["scaler"]
        assert ended[0]["schedule"] == expected[0]["schedule"]
    everywhere = [tensors for state in states for tensors, _ in state]
    # Evaluation, EMA and checkpoints use the running statistics of process 0, which agree too.
    # Those of process 1 are its own, where DistributedDataParallel copies process 0's.
    first_statistics = [statistics for _, statistics in states[0]]
    for first, *others in (everywhere, first_statistics):
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first)


def leave(rank, folder, way):
    """Train until one process ends, or stays away, in the seventh step."""
    join(rank, folder, timeout_s=3)
    step = create(StandIn)
    optimizer_step = step.optimizer_step

    def updated(number):
        optimizer_step(number)
        if (rank, number) == (1, 6):
            os._exit(3) if way == "dies" else time.sleep(5)

    step.optimizer_step = updated
    trained(rank, step)


@pytest.mark.parametrize("way", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_process_that_is_missing_ends_the_others_within_the_time_limit(tmp_path, way):
    codes, elapsed_s = end(tmp_path, leave, way)
    assert codes == [1, 3 if way == "dies" else 1]
    assert elapsed_s < 30


def test_gradients_become_views_of_a_tensor_per_dtype(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 3))
    model.to(memory_format=torch.channels_last)
    model[2].double()
    model[3].requires_grad_(False)
    gradients = flat.FlatGradients(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(InputError, match=r"of the 4 trained .* none of 4, such as 0.weight: excl"):
        gradients.collect()
    expected = []
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
        expected.append(parameter.grad.clone())
    sums = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sums.append(tensor.mul_(3)))
    gradients.average()
    storages = defaultdict(set)
    for parameter, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 3 / 4)
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.data_ptr() % (4 * parameter.element_size()) == 0
        storages[parameter.dtype].add(parameter.grad.untyped_storage().data_ptr())
    assert [len(found) for found in storages.values()] == [1, 1]
    assert len(sums) == 2
    assert model[3].weight.grad is None
