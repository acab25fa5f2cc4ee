"""Divide an optimizer step into the micro-batches of the processes."""

import dataclasses
import math

from tresnet.engine.config import TrainConfig
from tresnet.errors import ConfigError


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

    `images` counts training images. If `world_size` is not that with which the run `began`, a step
    keeps its number of images, but micro-batches may be smaller.
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
