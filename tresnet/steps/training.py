"""Training step: the model and everything that changes it while it learns.

`create_training_step` moves a model to its device and builds what the settings ask for around it. A
`TrainingStep` then runs micro-batches (`backward`) and optimizer steps (`update`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tresnet.errors import ConfigError
from tresnet.layers.norm import ABN
from tresnet.settings import Compute, EmaConfig, OptimConfig, ScheduleConfig
from tresnet.steps import optim
from tresnet.steps.compiled import CUDA_GRAPH_MODES, compile_model
from tresnet.steps.feed import Feed, reads_bytes
from tresnet.steps.graph import (
    WARMUP_PASSES,
    WARMUP_PASSES_DDP,
    Capturer,
    CudaCapturer,
    GraphedPasses,
    Pass,
    uses_graph,
)
from tresnet.steps.inference import place
from tresnet.steps.watch import Watch

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3


class TrainingStep:
    """Forward, loss and backward of micro-batches, then one optimizer step.

    `model` is the bare model, which is saved, and `average` its EMA or None. `schedule` steps once
    per optimizer step; None keeps the learning rate. `scaler` scales the loss in fp16 and does
    nothing otherwise. `feed` moves a loader's batch to the device, as `backward` wants it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        device: torch.device,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        scaler: Any = None,
        average: "ModelEmaV3 | None" = None,
        schedule: lr_scheduler.LRScheduler | None = None,
        clip_grad: float | None = None,
        mixes: bool = False,
        skips: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Keep the parts; the model is on its device already.

        `forward` computes the logits in place of the model: compiled, or in
        DistributedDataParallel. `no_sync` surrounds micro-batches after which processes exchange no
        gradients. `mixes` says that images are floats, as they are mixed, and `skips` keeps what
        `is_bad` and `skip` need.
        """
        self.model = model
        self.optimizer = optimizer
        self.average = average
        self.schedule = schedule
        self.scaler = scaler or torch.GradScaler(device.type, enabled=compute.amp == "fp16")
        self.feed = Feed(compute, device, keep_bytes=reads_bytes(model, compute) and not mixes)
        self._compute = compute
        self._device = device
        self._forward = model if forward is None else forward
        self._clip_grad = clip_grad
        self._watch = watch or Watch()
        self._no_sync = no_sync
        self._pass: Pass = self._eager_pass
        self._lr = self._next_lr()
        self._losses: list[Tensor] = []  # of the update under way, if it may be skipped
        self._kept = [buffer.clone() for buffer in model.buffers()] if skips else None

    @property
    def averaged(self) -> nn.Module:
        """The EMA if there is one, else the model: the weights that are evaluated."""
        return self.model if self.average is None else self.average.module

    @property
    def lr(self) -> float:
        """The highest learning rate of a group in the last optimizer step, or in the first."""
        return self._lr

    def _next_lr(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def backward(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        passes: int = 1,
        is_last: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward of one of `passes` micro-batches of an optimizer step.

        `images` (N, 3, H, W) on the device are floats in [0, 1] or bytes, `targets` labels (N,) or
        label distributions (N, classes). `criterion` takes float32 logits and targets to the mean
        loss. After the last (`is_last`) processes exchange gradients. Returns the detached loss ()
        and logits (N, classes), both float32.
        """
        if not self.model.training:
            self.model.train()
        if self._kept is not None and not self._losses:
            torch._foreach_copy_(self._kept, list(self.model.buffers()))
        loss, logits = self._pass(images, targets, criterion, passes, is_last)
        if self._kept is not None:
            self._losses.append(loss)
        return loss, logits

    def _eager_pass(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        passes: int,
        is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        with contextlib.nullcontext() if is_last else self._no_sync():
            with self._watch.during("forward"):
                with self._compute.autocast(self._device):
                    logits = self._forward(images)
                logits = logits.float()
                loss = criterion(logits, targets)
            with self._watch.during("backward"):
                self.scaler.scale(loss / passes).backward()
        return loss.detach(), logits.detach()

    def capture_with(
        self,
        capturer: Capturer,
        *,
        warmup_passes: int = WARMUP_PASSES,
        agree: Callable[[bool], bool] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Replay micro-batches as graphs from now on; arguments are those of `GraphedPasses`."""
        self._pass = GraphedPasses(
            self._eager_pass,
            self.model,
            capturer,
            warmup_passes=warmup_passes,
            agree=agree,
            say=say,
        )

    @property
    def replayed(self) -> bool:
        """Whether the last micro-batch was a CUDA graph's."""
        return isinstance(self._pass, GraphedPasses) and self._pass.replayed

    def update(self, number: int) -> None:
        """Change the weights by the gathered gradients; `number` counts optimizer steps from 1."""
        self._lr = self._next_lr()
        with self._watch.during("update"):
            if self._clip_grad is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step()
            if self.average is not None:
                self.average.update(self.model, step=number)

        self._losses.clear()

    @torch.no_grad()
    def is_bad(self) -> bool:
        """Whether a loss or gradient is not finite; in fp16 the scaler checks the gradients."""
        figures = list(self._losses)
        if not self.scaler.is_enabled():
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            figures.append(nn.utils.get_total_norm(gradients))
        return not bool(torch.stack(figures).isfinite().all())

    @torch.no_grad()
    def skip(self) -> None:
        """Leave out this optimizer step: restore running statistics and step the schedule alone."""
        assert self._kept is not None, "asked for by `skips`"
        self._lr = self._next_lr()
        torch._foreach_copy_(list(self.model.buffers()), self._kept)
        self.optimizer.zero_grad()
        self._losses.clear()
        if self.schedule is not None:
            with warnings.catch_warnings():  # that the optimizer did nothing is meant
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
                self.schedule.step()

    def is_finite(self) -> bool:
        """Whether all weights and running statistics are finite numbers."""
        tensors = [
            tensor for tensor in self.model.state_dict().values() if tensor.is_floating_point()
        ]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, the same on every process."""
        return {
            "model": self.model.state_dict(),
            "model_ema": None if self.average is None else self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "lr": self._lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.module.load_state_dict(state["model_ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self._lr = state["lr"]


def create_training_step(
    model: nn.Module,
    compute: Compute,
    device: torch.device,
    *,
    optimizer: OptimConfig | None = None,
    ema: EmaConfig | None = None,
    schedule: ScheduleConfig | None = None,
    updates: int | None = None,
    global_batch: int = 1,
    world: int = 1,
    sync_bn: bool = False,
    grad_checkpointing: bool = False,
    recompute: str | None = None,
    mixes: bool = False,
    skips: bool = False,
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    watch: Watch | None = None,
    say: Callable[[str], object] | None = None,
) -> TrainingStep:
    """Move a freshly created model to its device and build its training step around it.

    None for `ema` is no EMA, for `schedule` a constant learning rate, for `optimizer` the defaults;
    `build_optimizer` makes another than timm's. `updates` are the optimizer steps of the whole run,
    for the schedule, and `global_batch` the images of one over all processes, for `lr_batch`. A
    `world` of more than one process wraps the model in DistributedDataParallel, and `sync_bn`
    shares its batch statistics. `recompute` is that of `compile_model` for other models than ours.
    `mixes` says that images are mixed, so that they must be floats, and `skips` that bad optimizer
    steps may be skipped.

    Raises:
        ConfigError: timm has no such optimizer, it refuses an option, or micro-batches cannot be
            compiled or captured.
    """
    optimizer = optimizer or OptimConfig()
    check_compiled_passes(compute.compile, optimizer.accumulate)
    model = place(model, compute, device)
    compiles = compute.compile != "none"
    # DistributedDataParallel by graphs was seen on no GPU yet, and a hook's Python would not run
    captures = not grad_checkpointing and watch is None and world == 1
    graphed = uses_graph(compute, device, captures)
    if graphed and grad_checkpointing:
        raise ConfigError(
            "--cuda-graph: --grad-checkpointing sets random generators back, which no graph can:"
            " choose one, or --recompute outputs"
        )
    if sync_bn:
        model = synchronise(model, compiles)
    if grad_checkpointing:
        model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
    average = None
    if ema is not None and ema.ema_decay > 0:
        from timm.utils import ModelEmaV3

        average = ModelEmaV3(model, decay=ema.ema_decay, use_warmup=ema.ema_warmup)
    if build_optimizer is not None:
        made = build_optimizer(model.parameters())
    else:
        made = optim.create_optimizer(model, optimizer, global_batch, on_gpu=device.type == "cuda")
    capturer = CudaCapturer(device) if graphed else None
    wrapped, no_sync = model, contextlib.nullcontext
    # DistributedDataParallel holds on to what adds gradients up, which runs on the stream it was
    # made on: another than the captured one would end the capture
    with contextlib.nullcontext() if capturer is None else capturer.warming_up():
        if world > 1:
            ids = [device] if device.type == "cuda" else None
            wrapped = nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True)
            no_sync = wrapped.no_sync
    step = TrainingStep(
        model,
        made,
        compute,
        device,
        forward=(
            compile_model(wrapped, compute.compile, training=True, recompute=recompute, say=say)  # pyright: ignore[reportArgumentType]
            if compiles
            else wrapped
        ),
        no_sync=no_sync,
        average=average,
        schedule=None if schedule is None else optim.create_schedule(made, schedule, updates or 1),
        clip_grad=optimizer.clip_grad,
        mixes=mixes,
        skips=skips,
        watch=watch,
    )
    if capturer is not None:
        passes = WARMUP_PASSES_DDP if world > 1 else WARMUP_PASSES
        agree = functools.partial(_agree, device) if world > 1 else None
        step.capture_with(capturer, warmup_passes=passes, agree=agree, say=say)
    return step


def _agree(device: torch.device, holds: bool) -> bool:
    found = torch.tensor(float(holds), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def check_compiled_passes(mode: str, accumulate: int) -> None:
    """Refuse with `ConfigError` gradient accumulation over CUDA graphs of the compiler.

    The first micro-batch's gradients then are memory of its graph, into which the next one writes:
    PyTorch gives an error or wrong sums (its issues 169545 and 96693).
    """
    if accumulate > 1 and mode in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--accumulate: PyTorch loses gradients between passes with --compile {mode}: choose"
            " --compile default, with --cuda-graph or without"
        )


def synchronise(model: nn.Module, compiles: bool) -> nn.Module:
    """Let every batch norm of `model` share its statistics, in place, and return the model.

    The fused program shares them itself, and refuses norms that run outside of it, behind a hook.
    Where a model has none, or is compiled later, PyTorch's module takes the norm's place.
    """
    norms = [module for module in model.modules() if isinstance(module, ABN)]
    if compiles or not norms:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for norm in norms:
        norm.synchronised = True
    return model
