"""What other tools say of the same step: torchinfo, and torch's own MemTracker."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tresnet.errors import MissingDependencyError
from tresnet.memory.fake import fake_copy, meta_copy
from tresnet.memory.plan import Plan
from tresnet.memory.predict import STEPS


@dataclass(frozen=True)
class Rival:
    """A tool's name, and the function from a model and a plan to its bytes."""

    name: str
    n_bytes: Callable[[nn.Module, Plan], int]


def torchinfo_bytes(model: nn.Module, plan: Plan) -> int:
    """What torchinfo estimates: input, parameters, and all layer outputs twice.

    Raises:
        MissingDependencyError: torchinfo is not installed.
    """
    try:
        from torchinfo import summary
    except ImportError as error:
        raise MissingDependencyError(
            "torchinfo is compared with where it is installed: pip install torchinfo"
        ) from error
    x = torch.empty(plan.input_shape, dtype=plan.input_dtype, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = summary(meta_copy(model), input_data=x, verbose=0, device="meta", mode="eval")
    return info.total_input + info.total_output_bytes + info.total_param_bytes


def mem_tracker_bytes(model: nn.Module, plan: Plan) -> int:
    """The peak of `torch.distributed._tools.mem_tracker` over two steps on fake CPU tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cpu")
    copied = fake_copy(model, mode, device, channels_last=plan.channels_last)
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.empty(plan.input_shape, dtype=plan.input_dtype)
        target = torch.empty((plan.batch_size, *(plan.target_size or ())))
        y = target if plan.target_size else target.to(torch.int64)
        tracker = MemTracker()
        optimizer = plan.optimizer(copied.parameters()) if plan.train else None
        tracker.track_external(copied, x, y, *([optimizer] if optimizer else []))
        with tracker:
            for step in range(STEPS):
                _run(copied, plan, x, y, optimizer)
                if step == 0:
                    # Its modules' statistics must start anew each step.
                    tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    return int(snapshot[device]["Total"])


def _run(
    model: nn.Module,
    plan: Plan,
    x: torch.Tensor,
    y: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    model.train(plan.train)
    with (
        torch.set_grad_enabled(plan.train),
        torch.autocast("cpu", plan.amp or torch.bfloat16, enabled=plan.amp is not None),
    ):
        output = model(x)
        loss = plan.loss(output, y)
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


RIVALS = (
    Rival("torchinfo", torchinfo_bytes),
    Rival("mem_tracker", mem_tracker_bytes),
)
