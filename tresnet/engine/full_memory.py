"""Advise what to change if the GPU's memory was full."""

from collections.abc import Iterator

import torch

from tresnet.checkpoints.save import checkpoint_metadata
from tresnet.engine import batch_size
from tresnet.engine.config import TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.micro_batches import MicroBatches
from tresnet.engine.plan import RunPlan
from tresnet.engine.resolve import rebuild_model
from tresnet.errors import TResNetError


def advice(error: torch.OutOfMemoryError, plan: RunPlan, processes: Processes, last: str) -> str:
    """Return the message about full GPU memory; `last` is a text about the last checkpoint."""
    config, tried, fitting = plan.config, plan.batches.size, None
    if config.distill.teacher is not None:
        outlook = "what a teacher keeps in memory beside the model cannot be predicted"
    elif config.compute.compile != "none" or config.model.jit:
        outlook = "what a compiled or scripted model keeps in memory cannot be predicted"
    else:
        try:
            gpu = batch_size.gpu_of(config, processes.device)
            like = rebuild_model(config, checkpoint_metadata(plan.model))
            classes, world_size = plan.splits.classes, processes.world_size
            fitting = batch_size.largest(like, config, classes, gpu, world_size).batch_size
            outlook = f"predicted to fit on this {gpu.name}: {fitting} images at most"
            if fitting >= tried:
                outlook += ", yet these did not: look for other processes on the GPU"
        except (TResNetError, RuntimeError) as second:  # added to the message
            outlook = f"what would fit cannot be predicted: {second}"
    return (
        f"the GPU's memory is full with --batch-size {tried}: {error}\n  {last}\n  {outlook}\n"
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
    elif smaller := batch_size.round_down(limit, pairs=pairs):
        yield f"--batch-size {smaller}"
    if config.compute.amp == "off":
        yield "--amp auto"
    if config.model.norm != "abn":
        yield "--norm abn"
    if not config.model.grad_checkpointing:
        yield "--grad-checkpointing"
    yield "a smaller --input-size or --model"
