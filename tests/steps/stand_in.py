"""A stand-in for the capture of CUDA graphs without a GPU, and runs that use it."""

import contextlib

import torch
from torch.utils._pytree import tree_leaves

from tests import toys
from tests.operators import Recorder
from tresnet.settings import Compute, Step, TrainingBuild
from tresnet.steps import StepHost, TrainingStep

CPU = torch.device("cpu")


class StandIn:
    """Records each operator with its tensors, and replays the operators on the same tensors.

    After a capture, it restores what the operators changed, and fills their results with NaN,
    because a capture computes nothing.
    """

    def __init__(self, model):
        self.model, self.warmups = model, 0

    @contextlib.contextmanager
    def on_capture_stream(self):
        self.warmups += 1
        yield

    def serialized(self):
        return contextlib.nullcontext()

    def capture(self, function):
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        state = [*self.model.buffers(), *gradients]
        before = [t.clone() for t in state]
        generator = torch.get_rng_state()
        with Recorder() as recorder:
            outputs = function()
        torch.set_rng_state(generator)
        with torch.no_grad():
            for result in (*outputs, *(p.grad for p in self.model.parameters())):
                if result is not None:
                    result.fill_(torch.nan)
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        return outputs, lambda: self.replay(recorder.calls)

    def replay(self, calls):
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


class Failing(StandIn):
    def capture(self, function):
        super().capture(function)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def network():
    """Convolution, norm and dropout: buffers, gradients and random numbers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.2),
        torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3),
    )  # fmt: skip


def create_step(model, compute, device=CPU, *, checkpoints=False, **host):
    build = TrainingBuild(grad_checkpointing=checkpoints)
    return TrainingStep(model, Step(compute=compute, build=build), StepHost(device=device, **host))


def small(impl, **options):
    """A TResNet of a block a stage."""
    torch.manual_seed(0)
    return toys.small("tresnet_t", layers=(1, 1, 1, 1), impl=impl, **options)


def trained(
    capturer=None, accumulate=1, change=None, before=1, make=torch.nn.CrossEntropyLoss,
    of_images=False, odd=(), build=network, **settings,
):  # fmt: skip
    """Train 16 optimizer steps; `change(step, criterion)` runs before a micro-batch of the ninth.

    Return losses, weights and buffers; messages; and whether each micro-batch was replayed.
    """
    model, said, criterion = build(), [], make()
    torch.manual_seed(1)
    step = create_step(model, Compute(**settings))
    if capturer is not None:
        step.capture_with(capturer(model), say=said.append)
    results, replayed = [], []
    for number in range(1, 17):
        for part in range(1, accumulate + 1):
            if change is not None and (number, part) == (9, before):
                change(step, criterion)
            count = 3 if number in odd else 4
            images = torch.rand(count, 3, 8, 8).requires_grad_(of_images)
            labels = torch.randint(3, (count,))
            batch = step.feed(images, labels)
            results += step.backward(*batch, criterion, accumulate, part == accumulate)
            results += [images.grad] if of_images else []
            replayed.append(step.replayed)
        step.optimizer_step(number)
    return [*results, *model.state_dict().values()], said, replayed


def assert_eager(capturer, **keywords):
    """Assert that a run with graphs has the eager run's bits; return what `trained` does."""
    results, said, replayed = trained(capturer, **keywords)
    for tensor, expected in zip(results, trained(**keywords)[0], strict=True):
        assert torch.equal(tensor, expected)
    return said, replayed
