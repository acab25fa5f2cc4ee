"""Construction of optimizers and of learning rate schedules."""

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tresnet.errors import ConfigError
from tresnet.settings import OptimConfig, ScheduleConfig


def create_optimizer(
    model: nn.Module | Sequence[dict[str, Any]],
    config: OptimConfig,
    global_batch: int,
    *,
    on_gpu: bool = False,
) -> torch.optim.Optimizer:
    """Build timm's optimizer `config.opt`, without weight decay of biases and of 1D weights.

    A model's `no_weight_decay()` can exempt further parameters. If `model` is a list of parameter
    groups, only the groups decide which parameters have weight decay. `global_batch` is the number
    of images per optimizer step over all processes. With `on_gpu`, optimizers that have a fused
    version use this version, which saves kernel launches and, in fp16, a synchronization.
    `ConfigError`: `config.opt` is unknown to timm, rejects an option or needs second derivatives.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_class

    try:
        offered = inspect.signature(get_optimizer_class(config.opt, bind_defaults=False)).parameters
        fused: dict[str, Any] = {"fused": True} if on_gpu and "fused" in offered else {}
        optimizer = create_optimizer_v2(
            model,
            # timm's "sgd" (Nesterov) rejects a momentum of 0; timm's "momentum" (plain) accepts it.
            opt="momentum" if (config.opt, config.momentum) == ("sgd", 0) else config.opt,
            lr=peak_lr(config, global_batch),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            filter_bias_and_bn=True,
            layer_decay=None if config.layer_decay == 1 else config.layer_decay,
            **fused,
        )
        for group in optimizer.param_groups:  # torch's schedules ignore lr_scale, unlike timm's
            group["lr"] *= group.get("lr_scale", 1.0)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--opt: timm builds no optimizer {config.opt!r} with these options: {error}"
        ) from error
    if getattr(optimizer, "is_second_order", False):
        raise ConfigError(f"--opt: expected a first-order optimizer, got {config.opt!r}: try adamw")
    return optimizer


def peak_lr(config: OptimConfig, global_batch: int) -> float:
    """Return `config.lr`, scaled by `global_batch / config.lr_batch` unless `lr_batch` is None."""
    if config.lr_batch is None:
        return config.lr
    return config.lr * global_batch / config.lr_batch


def create_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> lr_scheduler.LRScheduler:
    """Return the learning rate schedule of `total_steps` optimizer steps."""
    if config.lr_schedule == "one-cycle":
        rising = config.warmup_fraction * total_steps
        total = total_steps + (rising == total_steps)  # torch divides by total - rising
        if rising == 1:  # torch's divisor rising - 1 must not be 0
            rising = 1.001
        return lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total,
            pct_start=rising / total,
            cycle_momentum=False,  # would fail for optimizers without momentum
            div_factor=1 / config.start_factor,
            final_div_factor=config.start_factor / config.end_factor,
        )
    return lr_scheduler.LambdaLR(optimizer, lambda step: factor(config, step, total_steps))


def advance(schedule: lr_scheduler.LRScheduler) -> None:
    """Step a schedule whose optimizer has not stepped, without torch's warning about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
        schedule.step()


# Replaces torch's CosineAnnealingLR, which has one final rate for all parameter groups. With
# layer-wise learning rates, each group must end at the same fraction of its own peak rate.
def factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the learning rate at `step` (from 0) as a fraction of the peak rate."""
    warmup = config.warmup_fraction * total_steps
    if step < warmup:
        return config.start_factor + (1 - config.start_factor) * step / warmup
    if config.lr_schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(total_steps - 1 - warmup, 1e-9), 1.0)
    return config.end_factor + (1 - config.end_factor) * (1 + math.cos(math.pi * progress)) / 2
