"""Predict the largest batch that fits the GPU, and advise if a batch did not fit.

`resolve` replaces `--batch-size auto` by the largest batch whose training step is predicted to fit.
`divide` splits an optimizer step into micro-batches, also if a resumed run has more or fewer
processes than before. `explain_full_memory` writes the message for a batch that did not fit.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tresnet.checkpoints.save import checkpoint_metadata
from tresnet.checkpoints.weights import WeightsInfo
from tresnet.engine import config as configs
from tresnet.engine.config import AUTO, TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.images import Splits
from tresnet.engine.losses import loss_of
from tresnet.engine.resolve import create_model, rebuild_model
from tresnet.env import parse_size
from tresnet.errors import ConfigError, InputError, TResNetError
from tresnet.models.tresnet import TResNet
from tresnet.ops.dispatch import lacking
from tresnet.settings import Compute, sides

if TYPE_CHECKING:
    from tresnet.engine.plan import RunPlan
    from tresnet.memory import Device, MaxBatch


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The size of one process's micro-batches, and their number per step and per epoch."""

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


def divide(config: TrainConfig, began: int, world_size: int, images: int) -> MicroBatches:
    """Divide an optimizer step's images among processes; raise ConfigError if that is impossible.

    `images` counts training images. `began` is the number of processes when the run began. If
    `world_size` differs, a step keeps its number of images, but micro-batches may be smaller.
    """
    batch, accumulate = config.data.resolved_batch_size, config.optim.accumulate
    in_epoch = images // (batch * began) * (batch * began)
    if world_size == began:
        return MicroBatches(batch, accumulate, in_epoch // (batch * began))
    per_process, rest = divmod(batch * accumulate * began, world_size)
    # Try the sizes of micro-batches from the configured size downwards.
    for parts in range(-(-per_process // batch), per_process + 1) if not rest else ():
        size = per_process // parts
        pairs = not (config.augment.mixes and size % 2)
        if per_process % parts == 0 and in_epoch % (size * world_size) == 0 and pairs:
            return MicroBatches(size, parts, in_epoch // (size * world_size))
    raise ConfigError(
        f"the run began with {began} processes, each step of {per_process * world_size + rest}"
        f" images, which can't be divided among {world_size}: use {began} processes, or a number"
        " that divides them"
    )


def resolve(
    config: TrainConfig,
    splits: Splits,
    weights: WeightsInfo | None,
    processes: Processes,
    say: Callable[[str], object],
    assumed: bool = False,
) -> TrainConfig:
    """Replace `--batch-size auto` by a number, which is the same on every process.

    The GPU with the least memory decides. `say` receives a line with the number and its reason.
    With `assumed`, the GPU is imaginary and has `config.compute.gpu_memory` of memory.
    """
    if config.data.batch_size != AUTO:
        return config
    from tresnet.memory.device import mib

    gpu = gpu_of(config, processes.device, assumed)
    model = create_model(config, splits.classes, weights)
    images, world_size, pairs = len(splits.train), processes.world_size, config.augment.mixes
    try:
        answer = largest(model, config, splits.classes, gpu, world_size)
    except InputError as error:
        raise ConfigError(
            f"--batch-size auto: the memory of this run cannot be predicted, so give a number:"
            f" {error}"
        ) from error
    found = round_down(answer.batch_size, pairs=pairs)
    memory = f"{mib(gpu.capacity_bytes or 0)} of {gpu.name}"
    if found == 0:
        raise ConfigError(
            f"--batch-size auto: not even one image is predicted to fit into {memory}, of which"
            f" {mib(gpu.context_high_bytes)} are kept for the CUDA context: free some memory or"
            f" give a number (it cannot fit from {answer.no_from} on)"
        )
    why = (
        f"of {answer.batch_size} that are predicted to fit into {memory} (from {answer.no_from} on"
        " they cannot)"
    )
    if found > images // world_size:
        found = max(round_down(images // world_size, pairs=pairs), 1)
        why = f"as there are {images} images to train for {world_size} processes; {why}"
    least = int(-processes.max(-found)[0])
    if least < found:
        why = f"as the process with the least memory has room for no more; here {found}, {why}"
    say(f"--batch-size auto: {least}, {why}")
    return configs.replace(config, batch_size=least)


def gpu_of(config: TrainConfig, device: torch.device, assumed: bool = False) -> "Device":
    """Return the GPU; its capacity is its free memory, at most `config.compute.gpu_memory`.

    With `assumed`, return an imaginary GPU that has `config.compute.gpu_memory` of memory. Without
    `assumed`, a `device` that is not a GPU raises ConfigError.
    """
    from tresnet.memory import find_device, present_device

    allowed = config.compute.gpu_memory
    if assumed:
        return find_device(gpu_memory=allowed)
    if device.type != "cuda":
        raise ConfigError(
            f"--batch-size auto: expected a GPU whose memory decides, got device {device}: give a"
            " number (or, to see what a GPU would take, --dry-run --gpu-memory 24GiB)"
        )
    lacking(device)  # tests the kernels, so that the prediction knows whether they work
    gpu = present_device(device.index or 0, free_only=True)
    if allowed is None or gpu.capacity_bytes is None:
        return gpu
    return dataclasses.replace(gpu, capacity_bytes=min(gpu.capacity_bytes, parse_size(allowed)))


def largest(
    model: TResNet, config: TrainConfig, classes: Sequence[str], gpu: "Device", world_size: int
) -> "MaxBatch":
    """Predict the largest batch of the run's training step on `gpu`."""
    from tresnet.memory import max_batch

    return max_batch(model, device=gpu, **step_of(config, classes, world_size))


def step_of(config: TrainConfig, classes: Sequence[str], world_size: int) -> dict[str, Any]:
    """Return the configured training step as arguments of `tresnet.memory.max_batch`."""
    sizes = (config.data.resolved_input_size, *config.data.sizes)
    height, width = max(map(sides, sizes), key=math.prod)
    mixes = config.augment.mixes
    # sync_bn is left out, because it changes the memory of batch norm by only a few vectors.
    return {
        **config.compute.values(Compute),
        **vars(config.optim),
        **vars(config.ema),
        "input_size": (3, height, width),
        "input": "uint8",
        "mixes": mixes,
        "loss": loss_of(config, classes, mixes),
        "target_size": (len(classes),) if mixes or config.labels.multi else None,
        "grad_checkpointing": config.model.grad_checkpointing,
        "ddp": world_size > 1,
    }


def round_down(batch_size: int, *, pairs: bool) -> int:
    """Round down to a multiple of 8. Below 8, round down to an even number if `pairs`."""
    # Kernels for 16-bit types are fastest with multiples of 8. Mixing needs pairs of images.
    return batch_size - batch_size % (8 if batch_size >= 8 else 2 if pairs else 1)


def explain_full_memory(
    error: torch.OutOfMemoryError,
    plan: "RunPlan",
    model: nn.Module,
    processes: Processes,
    last: str,
) -> str:
    """Return the message about full GPU memory; `last` is a text about the last checkpoint."""
    config, tried, fitting = plan.config, plan.batches.size, None
    if config.distill.teacher is not None:
        said = "what a teacher keeps in memory beside the model cannot be predicted"
    elif config.compute.compile != "none" or config.model.jit:
        said = "what a compiled or scripted model keeps in memory cannot be predicted"
    else:
        try:
            gpu = gpu_of(config, processes.device)
            like = rebuild_model(config, checkpoint_metadata(model))
            answer = largest(like, config, plan.splits.classes, gpu, processes.world_size)
            fitting = answer.batch_size
            said = f"predicted to fit on this {gpu.name}: {fitting} images at most"
            if fitting >= tried:
                said += ", yet these did not: look for other processes on the GPU"
        except (TResNetError, RuntimeError) as second:  # added to the message
            said = f"what would fit cannot be predicted: {second}"
    return (
        f"the GPU's memory is full with --batch-size {tried}: {error}\n  {last}\n  {said}\n"
        "  for a new run, as a resumed one keeps its options, try"
        f" {'; or '.join(ways_out(config, plan.batches, fitting))}"
    )


def ways_out(config: TrainConfig, batches: MicroBatches, fitting: int | None) -> Iterator[str]:
    """Yield options that save memory; `fitting` is the largest batch predicted to fit, or None."""
    tried, pairs = batches.size, config.augment.mixes
    limit = tried // 2 if fitting is None or fitting >= tried else fitting
    halves = range(-(-limit // 2), limit + 1)  # from half of `limit` to `limit`
    equal = [size for size in halves if size and tried % size == 0 and not (pairs and size % 2)]
    if equal:
        yield (
            f"--batch-size {equal[-1]} --accumulate {batches.images_per_step // equal[-1]}, which"
            f" keeps {batches.images_per_step} images per step"
        )
    elif smaller := round_down(limit, pairs=pairs):
        yield f"--batch-size {smaller}"
    if config.compute.amp == "off":
        yield "--amp auto"
    if config.model.norm != "abn":
        yield "--norm abn"
    if not config.model.grad_checkpointing:
        yield "--grad-checkpointing"
    yield "a smaller --input-size or --model"
