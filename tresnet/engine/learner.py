"""The model and everything that changes it while it learns."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.engine import optim
from tresnet.engine.config import TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.feed import Feed, reads_bytes
from tresnet.engine.predictor import Predictor, autocast, compiled, place
from tresnet.engine.sync_norm import synchronise


class Learner:
    """One process's model, its average, optimizer, schedule and loss scaling.

    Attributes:
        model: The bare model; what is saved.
        ema: timm's moving average of it, or None.
        optimizer: With one group without weight decay (biases, norms) and one with.
        schedule: Steps once per update.
        scaler: Scales the loss in fp16; does nothing otherwise.
        feed: Moves a loader's batch to the device, as `backward` wants it.
        tested: Evaluates the average, or the model where there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        processes: Processes,
        updates: int,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Move the model to its device and build the rest around it.

        Args:
            model: Freshly created, with the same weights on every process.
            config: A resolved configuration.
            processes: This process's place.
            updates: How many updates the whole run has.
            say: Told how long compiling took; None for the log.
        """
        self._config = config
        self._device = processes.device
        model = place(model, config.compute, self._device)
        if config.compute.sync_bn:
            example = next(model.parameters())
            model = synchronise(model, example, config.compute.compile)
        if config.model.grad_checkpointing:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
        self.model = model
        self.ema = _average(model, config)
        global_batch = config.data.resolved_batch_size * config.optim.accumulate * processes.world
        self.optimizer = optim.create_optimizer(model, config.optim, global_batch)
        self.schedule = optim.create_schedule(self.optimizer, config.schedule, updates)
        self.scaler = torch.GradScaler(self._device.type, enabled=config.compute.amp == "fp16")
        self._wrapped = _distribute(model, processes)
        self._forward = compiled(self._wrapped, config.compute, True, say)
        keep_bytes = reads_bytes(model, config.compute) and not config.augment.mixes
        self.feed = Feed(config.compute, self._device, keep_bytes=keep_bytes)
        self.tested = Predictor(self.averaged, config.compute, self._device, say)

    @property
    def averaged(self) -> nn.Module:
        """What is evaluated and kept as best: the average if there is one, else the model."""
        return self.model if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    def backward(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        passes: int,
        is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        """One forward and backward pass of an update that is the mean over `passes` of them.

        Args:
            images: (N, 3, H, W) on the device, floats in [0, 1] or bytes.
            targets: Labels (N,) or label distributions (N, classes).
            criterion: From float32 logits and targets to the mean loss.
            passes: Passes of this update.
            is_last: Whether it is the last of them, after which processes exchange gradients.

        Returns:
            The detached loss () and logits (N, classes), both float32.
        """
        hold = contextlib.nullcontext()
        if not is_last and isinstance(self._wrapped, nn.parallel.DistributedDataParallel):
            hold = self._wrapped.no_sync()
        self.model.train()
        with hold:
            with autocast(self._config.compute, self._device):
                logits = self._forward(images)
            logits = logits.float()
            loss = criterion(logits, targets)
            self.scaler.scale(loss / passes).backward()
        return loss.detach(), logits.detach()

    def update(self, number: int) -> None:
        """Change the weights by the gradients gathered; `number` counts updates from 1."""
        limit = self._config.optim.clip_grad
        if limit is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.ema is not None:
            self.ema.update(self.model, step=number)

    def is_finite(self) -> bool:
        """Whether all weights and running statistics are finite numbers."""
        tensors = [
            tensor for tensor in self.model.state_dict().values() if tensor.is_floating_point()
        ]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs of this object; the same on every process."""
        return {
            "model": self.model.state_dict(),
            "model_ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["model_ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])


def _average(model: nn.Module, config: TrainConfig) -> Any:
    if config.ema.ema_decay == 0:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=config.ema.ema_decay, use_warmup=config.ema.ema_warmup)


def _distribute(model: nn.Module, processes: Processes) -> nn.Module:
    if processes.world == 1:
        return model
    ids = [processes.device] if processes.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
