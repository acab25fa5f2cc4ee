"""Training step: a model with its optimizer, EMA, schedule and gradient scaler."""

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tresnet import devices
from tresnet.errors import ConfigError
from tresnet.settings import EmaConfig, ScheduleConfig, Step
from tresnet.steps.capturer import CudaCapturer
from tresnet.steps.compiled import Say, check_compiled_accumulation, compile_model, log
from tresnet.steps.feed import Feed, reads_bytes
from tresnet.steps.flat_gradients import FlatGradients
from tresnet.steps.freezing import freeze, frozen_modules
from tresnet.steps.graph import WARMUP_RUNS, GraphedStep, uses_graph
from tresnet.steps.inference import During, move_model
from tresnet.steps.optim import advance, create_optimizer, create_schedule

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepHost:
    """What a run decides for its training step: device, processes, schedule and callbacks."""

    device: torch.device
    world_size: int = 1  # above 1, gradients are averaged over the processes
    sync_bn: bool = False  # synchronize batch statistics between processes
    global_batch: int = 1  # images per optimizer step over all processes
    schedule: ScheduleConfig | None = None  # None: a constant learning rate
    total_steps: int = 1  # length of the schedule in optimizer steps
    mixes: bool = False  # `feed` converts images to floats, which mixup needs
    skips: bool = False  # for `is_bad` and `skip`: store losses, and buffers before each step
    normalised_by: Mapping[str, Any] | None = None  # `pretrained_cfg` whose mean `feed` subtracts
    build_optimizer: OptimizerFactory | None = None  # builds the optimizer in place of timm
    during: During | None = None  # returns the context manager in which a phase of a step runs
    say: Say = log  # called with messages about compilation and CUDA graphs
    warn: Say | None = None  # gets, in place of `say`, the reasons why no CUDA graph is replayed


class TrainingStep(GraphedStep):
    """Training of one model: forward and backward of micro-batches, then an optimizer step.

    `model` has no wrapper of DistributedDataParallel or the compiler. `model_ema` is timm's EMA of
    `model`, or None. `schedule` sets the learning rate of each optimizer step; without a schedule,
    the rate is constant. `scaler` scales the loss in fp16, and has no effect otherwise. `feed`
    moves a batch to the device. `lr` is the highest learning rate of all parameter groups in the
    latest step; before the first step, it is that step's rate.

    With several processes, `DistributedDataParallel` averages gradients during backward. A step
    that replays CUDA graphs averages them after the last micro-batch instead (`FlatGradients`).

    Parts that `train_only` freezes run in eval mode: their norms use and keep their statistics.
    Autograd saves nothing for frozen parts in front of all others.
    """

    _trains = True

    def __init__(self, model: nn.Module, step: Step, host: StepHost) -> None:
        """Move the model to its device, and build its optimizer, EMA, schedule and scaler.

        `ConfigError`: timm cannot build the optimizer; or the settings rule out compilation or
        CUDA graphs.
        """
        device, several = host.device, host.world_size > 1
        compute = step.compute.decided(devices.capability(device))
        check_compiled_accumulation(compute.compile, step.optim.accumulate)
        move_model(model, compute, device)
        if host.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        capturer = CudaCapturer(device) if _captures(model, step, host) else None
        if step.build.grad_checkpointing:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
        self.model = model
        # Created before DistributedDataParallel adds a prefix to the names of parameters.
        self.model_ema = _create_ema(model, step.ema)
        self._step, self._host, self._averages = step, host, several and capturer is not None
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._frozen: list[nn.Module] = []
        self.schedule: LRScheduler | None = None
        self.scaler = torch.GradScaler(device.type, enabled=compute.amp == "fp16")
        keep_bytes = reads_bytes(model, compute) and not host.mixes
        self.feed = Feed(compute, device, keep_bytes=keep_bytes, normalised_by=host.normalised_by)
        self._compute, self._device = compute, device
        self._run_counts: Counter[torch.Size] = Counter()  # micro-batches by the images' shape
        self.train_only(step.optim.train_only)
        self._clip_grad = step.optim.clip_grad
        self._during = host.during or contextlib.nullcontext
        if capturer is not None:
            self.capture_with(capturer, say=host.say, warn=host.warn)
        self.lr = self._next_lr()
        self._losses: list[Tensor] = []  # losses of this optimizer step, if `skips`
        self._buffers = [buffer.clone() for buffer in model.buffers()] if host.skips else None

    def train_only(self, parts: Sequence[str] | None) -> None:
        """Train only these parts from now on, or all if None, with a new optimizer.

        The schedule goes on where it was. Whatever depends on the trained parameters is built anew:
        the average over processes, the compiled model and CUDA graphs. Call this method between
        two optimizer steps, on all processes. `ConfigError`: the model has no such part.
        """
        step, host, model = self._step, self._host, self.model
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        if parts is not None:
            freeze(model, parts)
        was_frozen, self._frozen = self._frozen, [] if parts is None else frozen_modules(model)
        if was_frozen or self._frozen:
            self._set_modes()
        self._build_optimizer()
        self._forward: Callable[[Tensor], Tensor] = model
        self._no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self._flat_gradients = _share(model) if self._averages else None
        if host.world_size > 1 and not self._averages:
            self._forward = _data_parallel(model, self._device)
            self._no_sync = self._forward.no_sync
        if self._compute.compile != "none":
            options = {"training": True, "recompute": step.build.recompute, "say": host.say}
            self._forward = compile_model(self._forward, self._compute.compile, **options)
        self._run_counts.clear()
        self.drop_graphs()

    def _set_modes(self) -> None:
        self.model.train()
        for module in self._frozen:
            module.eval()

    def _build_optimizer(self) -> None:
        """Build the optimizer of the parameters that train, and its schedule from this step on."""
        host, optim, on_gpu = self._host, self._step.optim, self._device.type == "cuda"
        if host.build_optimizer is not None:
            self.optimizer = host.build_optimizer(p for p in self._trainable if p.requires_grad)
        else:
            self.optimizer = create_optimizer(self.model, optim, host.global_batch, on_gpu=on_gpu)
        if host.schedule is not None:
            schedule = create_schedule(self.optimizer, host.schedule, host.total_steps)
            if self.schedule is not None:
                schedule.last_epoch = self.schedule.last_epoch - 1
                advance(schedule)
            self.schedule = schedule

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate: the EMA if there is one, else `model`."""
        return self.model if self.model_ema is None else self.model_ema.module

    def _next_lr(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def backward(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        micro_batches: int = 1,
        is_last: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward of one of the `micro_batches` of an optimizer step.

        Images (N, 3, H, W) are on the device, floats in [0, 1] or uint8. Targets are labels (N,) or
        label distributions (N, classes). `criterion` maps float32 logits and targets to the mean
        loss; backward divides this loss by `micro_batches`. `is_last` marks the last micro-batch,
        after which gradients are averaged over processes. Returns the loss, a scalar that is not
        divided, and the logits (N, classes), both detached and in float32.
        """

        def run(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            with contextlib.nullcontext() if is_last else self._no_sync():
                with self._during("forward"):
                    with self._compute.autocast(self._device):
                        logits = self._forward(images)
                    logits = logits.float()  # the loss is computed outside autocast, in float32
                    loss = criterion(logits, targets)
                with self._during("backward"):
                    self.scaler.scale(loss / micro_batches).backward()
            return loss.detach(), logits.detach()

        if not self.model.training:
            self._set_modes()
        if self._buffers is not None and not self._losses:
            torch._foreach_copy_(self._buffers, list(self.model.buffers()))
        self._last_shape = images.shape
        self._run_counts[images.shape] += 1
        if self._graphs is None:
            loss, logits = run(images, targets)
        else:
            loss, logits = self._graphs(run, [images, targets], criterion, micro_batches)
        if is_last and self._flat_gradients is not None:
            # Replayed or not, all processes are here once in a step.
            with self._during("backward"):
                self._flat_gradients.average()
        if self._buffers is not None:
            self._losses.append(loss)
        return loss, logits

    @property
    def setting_up(self) -> bool:
        """Whether the last micro-batch was set-up, whose time and memory are not training's.

        On a GPU or with a compiler, the first micro-batches of a shape search convolution
        algorithms and compile kernels. Later ones capture a CUDA graph.
        """
        has_set_up = self._device.type == "cuda" or self._compute.compile != "none" or self._graphs
        is_new = bool(has_set_up) and self._run_counts[self._last_shape] <= WARMUP_RUNS
        return is_new or super().setting_up

    def optimizer_step(self, global_step: int) -> None:
        """Update weights, EMA and learning rate; `global_step` counts optimizer steps from 1."""
        self.lr = self._next_lr()
        with self._during("optimizer"):
            if self._clip_grad is not None:
                self.scaler.unscale_(self.optimizer)  # `clip_grad` limits unscaled gradients
                nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step()
            if self.model_ema is not None:
                self.model_ema.update(self.model, step=global_step)
        self._losses.clear()

    @torch.no_grad()
    def is_bad(self) -> bool:
        """Return whether a loss of the step, or (except in fp16) a gradient, is not finite."""
        values = list(self._losses)
        if not self.scaler.is_enabled():  # in fp16, the scaler itself skips infinite gradients
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            values.append(nn.utils.get_total_norm(gradients))
        return not bool(torch.stack(values).isfinite().all())

    @torch.no_grad()
    def skip(self) -> None:
        """Skip an optimizer step: drop gradients, undo changes of buffers, step the schedule."""
        assert self._buffers is not None, "`StepHost.skips` is set"
        self.lr = self._next_lr()
        torch._foreach_copy_(list(self.model.buffers()), self._buffers)
        self.optimizer.zero_grad()
        self._losses.clear()
        if self.schedule is not None:
            advance(self.schedule)

    def is_finite(self) -> bool:
        """Return whether all weights and running statistics are finite numbers."""
        tensors = self.model.state_dict().values()
        finite = [x.isfinite().all() for x in tensors if x.is_floating_point()]
        return bool(torch.stack(finite).all())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming a run; only running statistics differ between processes."""
        parts = self._parts().items()
        states = {name: None if part is None else part.state_dict() for name, part in parts}
        return {**states, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            if part is not None:
                part.load_state_dict(state[name])
        self.lr = float(state["lr"])

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "model_ema": self.model_ema and self.model_ema.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }


def _create_ema(model: nn.Module, settings: EmaConfig) -> "ModelEmaV3 | None":
    if settings.ema_decay == 0:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=settings.ema_decay, use_warmup=settings.ema_warmup)


def _share(model: nn.Module) -> FlatGradients:
    """Copy process 0's weights to all processes; return the tensor that averages gradients."""
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.detach(), src=0)
    return FlatGradients(model)


def _data_parallel(model: nn.Module, device: torch.device) -> nn.parallel.DistributedDataParallel:
    # cuDNN's gradients of a squeeze-and-excitation's 1x1 weights have other strides than the
    # channels-last weights. The order in memory is equal, but PyTorch would warn (pytorch 157862).
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    devices = [device] if device.type == "cuda" else None
    # Without bucket views, every gradient would be stored twice.
    return nn.parallel.DistributedDataParallel(model, devices, gradient_as_bucket_view=True)


def _captures(model: nn.Module, step: Step, host: StepHost) -> bool:
    refusal = None
    if step.build.grad_checkpointing:
        refusal = "--grad-checkpointing sets random generators back"
    elif host.world_size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        refusal = "--sync-bn exchanges statistics during forward"
    # A replay would not enter the context managers that `host.during` returns.
    captures = uses_graph(step.compute, host.device, refusal is None and host.during is None)
    if captures and refusal is not None:
        raise ConfigError(
            f"--cuda-graph on: {refusal}, which a CUDA graph cannot do: choose one of the two "
            "options"
        )
    return captures
