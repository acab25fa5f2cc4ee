"""Sizes of batches: micro-batches of each process, and the largest that fits its GPU."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tresnet.data.crops import device_bytes
from tresnet.engine.config import Filled, Resolved
from tresnet.engine.distributed import Processes
from tresnet.engine.losses import loss_of
from tresnet.errors import ConfigError, InputError
from tresnet.models.tresnet import TResNet
from tresnet.settings import InferenceCompute, Input, ModelStep, Sides, TrainingBuild, sides
from tresnet.settings.fields import parse_size
from tresnet.steps.graph import uses_graph

if TYPE_CHECKING:
    from tresnet.memory import Device, MaxBatch
    from tresnet.memory.plan import MemoryPlan


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Size of a process's micro-batches, and their number per optimizer step and per epoch."""

    size: int  # images per micro-batch
    accumulate: int  # micro-batches per optimizer step
    per_epoch: int  # micro-batches per epoch

    @property
    def images_per_step(self) -> int:
        """Number of images of an optimizer step on one process."""
        return self.size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch; the last step may have fewer micro-batches."""
        return math.ceil(self.per_epoch / self.accumulate)


def divide(config: Resolved, began: int, world_size: int, images: int) -> MicroBatches:
    """Divide an optimizer step's images among processes; raise ConfigError if that is impossible.

    `images` is the number of training images. `began` is the world size with which the run began.
    With another world size, a step keeps its number of images, but micro-batches may be smaller.
    """
    batch = config.batch_size
    accumulate = config.step.optim.accumulate
    in_epoch = images // (batch * began) * (batch * began)
    if world_size == began:
        return MicroBatches(batch, accumulate, in_epoch // (batch * began))
    per_process, rest = divmod(batch * accumulate * began, world_size)
    epoch, epoch_rest = divmod(in_epoch, world_size)
    size = largest_divisor(math.gcd(per_process, epoch), batch, pairs=config.augment.mixes)
    if size and not rest and not epoch_rest:
        return MicroBatches(size, per_process // size, epoch // size)
    began_with = f"{began} process{'es' * (began > 1)}"
    fault = f"which can't be divided among {world_size}"
    if not rest and not epoch_rest:
        fault = f"of which each of {world_size} would mix an odd number, but mixing is in pairs"
    raise ConfigError(
        f"the run began with {began_with}, each step of {per_process * world_size + rest} images,"
        f" {fault}: use {began_with}, or a number that divides the images"
    )


def resolve(
    config: Filled,
    model: TResNet,
    classes: Sequence[str],
    images: int,
    processes: Processes,
) -> Resolved:
    """Return the complete configuration: `--batch-size auto` becomes a number (a collective).

    The number is the largest predicted to fit on every GPU, rounded by `round_down`, and at most
    each process's fraction of the `images` to train on. A line names the result and its reasons.
    """
    if isinstance(config.batch_size, int):
        return Resolved(**vars(config))
    from tresnet.memory.device import mib

    pairs, share = config.augment.mixes, images // processes.world_size
    processes.barrier()  # makes NCCL take its memory before the free memory is read
    try:
        answer = largest(model, config, classes, processes)
    except InputError as error:
        raise ConfigError(
            f"--batch-size auto: the memory of this run cannot be predicted, so give a number:"
            f" {error}"
        ) from error
    gpu = answer.device
    memory = f"{mib(gpu.capacity_bytes or 0)} of {gpu.name}"
    size = round_down(answer.batch_size, pairs=pairs)
    if size == 0:
        raise ConfigError(
            f"--batch-size auto: not even one image is predicted to fit into {memory}, of which"
            f" {mib(gpu.context_high_bytes)} are kept for CUDA's context and kernels: free some"
            f" memory or give a number ({answer.no_from} images and more cannot fit)"
        )
    size = min(size, max(round_down(share, pairs=pairs), 1))
    least = int(-processes.max(-size)[0])
    processes.console.say(
        f"--batch-size auto: {least} on each of {processes.world_size}"
        f" process{'es' * (processes.world_size > 1)}; here"
        f" {answer.batch_size} images are predicted to fit into {memory}, {answer.no_from} and more"
        f" cannot fit, and there are {share} to train on"
    )
    return Resolved(**{**vars(config), "batch_size": least})


def largest(
    model: TResNet, config: Filled, classes: Sequence[str], processes: Processes
) -> "MaxBatch":
    """Predict the largest batch with which the run's training step fits on this process's GPU.

    Raises ConfigError without a GPU, and InputError if the step cannot be predicted.
    """
    from tresnet.memory.capacity import largest_batch

    build = config.step.build
    for name, is_set in (("teacher", config.distill.teacher), ("jit", build.jit)):
        if is_set:
            raise InputError(f"no prediction with --{name}")
    gpu = gpu_of(config, processes.device)
    if config.machine.sync_bn:  # SyncBatchNorm runs without fused kernels and needs more memory
        model = copy.copy(model)
        model.runner = None
    replays = not (build.grad_checkpointing or config.machine.sync_bn)
    graphs = uses_graph(config.step.compute, processes.device, replays)
    plan = plan_of(config, gpu, classes, processes.world_size)
    return largest_batch(model, plan, evaluation_plan(config, gpu) if graphs else None)


def gpu_of(config: Filled, device: torch.device) -> "Device":
    """Return the GPU `device` with its free memory, at most `gpu_memory`, as capacity."""
    from tresnet.memory import present_device

    if device.type != "cuda":
        raise ConfigError(
            f"--batch-size auto: expected a GPU whose memory decides, got device {device}: give a"
            " number (tresnet memory max-batch MODEL --gpu-memory 24GiB predicts one for a GPU)"
        )
    gpu, allowed = present_device(device.index or 0, free_only=True), config.machine.gpu_memory
    if allowed is None or gpu.capacity_bytes is None:
        return gpu
    return dataclasses.replace(gpu, capacity_bytes=min(gpu.capacity_bytes, parse_size(allowed)))


def plan_of(config: Filled, gpu: "Device", classes: Sequence[str], world_size: int) -> "MemoryPlan":
    """Return the plan, for batches of one image, that predicts the memory of the run's step."""
    step, mixes = config.step, config.augment.mixes
    parts = ModelStep(  # without options of the model, which is built already
        build=TrainingBuild(grad_checkpointing=step.build.grad_checkpointing),
        compute=InferenceCompute(**vars(step.compute)),
        optim=step.optim,
        ema=step.ema,
    )
    return _plan(
        config.in_chans,
        (config.data.input_size, *config.data.sizes),
        step=parts,
        device=gpu,
        mixes=mixes,
        loss=loss_of(config, classes, mixes),
        target_size=(len(classes),) if mixes or config.labels.multi else None,
        ddp=world_size > 1,
    )


def evaluation_plan(config: Filled, gpu: "Device") -> "MemoryPlan":
    """Return the plan, for batches of one image, that predicts the memory of an evaluation."""
    step = ModelStep(compute=InferenceCompute(**vars(config.step.compute), fold=False))
    return _plan(config.in_chans, (config.data.input_size,), step=step, device=gpu, train=False)


def _plan(channels: int, sizes: Sequence[Sides], **settings: Any) -> "MemoryPlan":
    """Return a plan for one image of the largest size, in the loaders' dtype."""
    from tresnet.memory.plan import MemoryPlan

    size = max(map(sides, sizes), key=math.prod)
    dtype: Input = "uint8" if channels == 3 else "float"
    common = {"batch_size": 1, "input": dtype, "loader_bytes": device_bytes(size, channels)}
    return MemoryPlan(input_size=(channels, *size), **common, **settings)


def largest_divisor(number: int, at_most: int, *, pairs: bool) -> int:
    """Return the largest divisor of `number` up to `at_most`, even if `pairs`; 0 if none exists."""
    sizes = range(min(number, at_most), 0, -1)
    return next((size for size in sizes if number % size == 0 and not (pairs and size % 2)), 0)


def round_down(batch_size: int, *, pairs: bool) -> int:
    """Round down to a multiple of 8. Below 8, round down to an even number if `pairs`."""
    # Kernels for 16-bit types are fastest with multiples of 8. Mixing needs pairs of images.
    return batch_size - batch_size % (8 if batch_size >= 8 else 2 if pairs else 1)
