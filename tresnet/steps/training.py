"""Training step: a model with its optimizer, EMA, schedule and gradient scaler.

`create_training_step` moves a model to its device and builds the objects that the settings request.
`TrainingStep.backward` runs a micro-batch, and `optimizer_step` updates the weights. The engine,
benchmarks and memory predictions all run this step, so that their figures are comparable.
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
from tresnet.steps.graph import WARMUP_RUNS, WARMUP_RUNS_DDP, CudaCapturer, Graphs, uses_graph
from tresnet.steps.hooks import StepHooks
from tresnet.steps.inference import move_model

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3


class TrainingStep:
    """Runs forward, loss and backward of micro-batches, then an optimizer step.

    `model` is the plain model, which is saved. `model_ema` is its EMA, or None. `schedule` sets the
    learning rate of each optimizer step; None keeps the rate. `scaler` scales the loss in fp16, and
    has no effect otherwise. `feed` moves a batch from the loader to the device.
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
        model_ema: "ModelEmaV3 | None" = None,
        schedule: lr_scheduler.LRScheduler | None = None,
        clip_grad: float | None = None,
        mixes: bool = False,
        skips: bool = False,
        hooks: StepHooks | None = None,
    ) -> None:
        """Store the arguments; the model must be on its device already.

        `forward` is the model compiled or in DistributedDataParallel; None means `model`. In the
        context `no_sync()`, processes exchange no gradients. All micro-batches of an optimizer step
        except the last run in that context. `mixes` makes `feed` return floats, which mixup needs.
        `skips` stores losses and buffers of each optimizer step, for `is_bad` and `skip`.
        """
        self.model = model
        self.optimizer = optimizer
        self.model_ema = model_ema
        self.schedule = schedule
        self.scaler = torch.GradScaler(device.type, enabled=compute.amp == "fp16")
        self.feed = Feed(compute, device, keep_bytes=reads_bytes(model, compute) and not mixes)
        self._compute = compute
        self._device = device
        self._forward = model if forward is None else forward
        self._clip_grad = clip_grad
        self._hooks = hooks or StepHooks()
        self._no_sync = no_sync
        self._graphs: Graphs | None = None
        self._lr = self._next_lr()
        self._losses: list[Tensor] = []  # losses of this optimizer step, if `skips`
        self._kept = [buffer.clone() for buffer in model.buffers()] if skips else None

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate: the EMA if there is one, else `model`."""
        return self.model if self.model_ema is None else self.model_ema.module

    @property
    def lr(self) -> float:
        """Highest learning rate of all parameter groups in the latest optimizer step.

        Before any optimizer step, it is the rate of the first step.
        """
        return self._lr

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

        Images (N, 3, H, W) are on the device, floats in [0, 1] or bytes. Targets are labels (N,) or
        label distributions (N, classes). `criterion` maps float32 logits and targets to the mean
        loss; its gradient is divided by `micro_batches`. Processes exchange gradients after the
        last micro-batch (`is_last`). Returns the detached loss () and logits (N, classes), float32.
        """
        if not self.model.training:
            self.model.train()
        if self._kept is not None and not self._losses:
            torch._foreach_copy_(self._kept, list(self.model.buffers()))
        settings: Any = {"criterion": criterion, "micro_batches": micro_batches, "is_last": is_last}
        run = functools.partial(self._run_micro_batch, **settings)
        if self._graphs is None:
            loss, logits = run(images, targets)
        else:
            loss, logits = self._graphs(run, [images, targets], **settings)
        if self._kept is not None:
            self._losses.append(loss)
        return loss, logits

    def _run_micro_batch(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Callable[[Tensor, Tensor], Tensor],
        micro_batches: int,
        is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        with contextlib.nullcontext() if is_last else self._no_sync():
            with self._hooks.during("forward"):
                with self._compute.autocast(self._device):
                    logits = self._forward(images)
                logits = logits.float()
                loss = criterion(logits, targets)
            with self._hooks.during("backward"):
                self.scaler.scale(loss / micro_batches).backward()
        return loss.detach(), logits.detach()

    def capture_with(self, capturer: CudaCapturer, **options: Any) -> None:
        """Replay micro-batches as CUDA graphs from now on; `options` are passed to `Graphs`."""
        self._graphs = Graphs(self.model, capturer, trains=True, **options)

    @property
    def replayed(self) -> bool:
        """Whether the last micro-batch was a replay of a CUDA graph."""
        return self._graphs is not None and self._graphs.replayed

    def optimizer_step(self, global_step: int) -> None:
        """Update weights, EMA and learning rate; `global_step` counts optimizer steps from 1."""
        self._lr = self._next_lr()
        with self._hooks.during("optimizer"):
            if self._clip_grad is not None:
                self.scaler.unscale_(self.optimizer)
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
        """Return whether a loss is not finite; except in fp16, also check the gradients."""
        figures = list(self._losses)
        if not self.scaler.is_enabled():
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            figures.append(nn.utils.get_total_norm(gradients))
        return not bool(torch.stack(figures).isfinite().all())

    @torch.no_grad()
    def skip(self) -> None:
        """Drop this step's gradients, restore the running statistics, and step the schedule."""
        assert self._kept is not None, "asked for by `skips`"
        self._lr = self._next_lr()
        torch._foreach_copy_(list(self.model.buffers()), self._kept)
        self.optimizer.zero_grad()
        self._losses.clear()
        if self.schedule is not None:
            with warnings.catch_warnings():  # torch warns, because the optimizer's step is skipped
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
                self.schedule.step()

    def is_finite(self) -> bool:
        """Return whether all weights and running statistics are finite numbers."""
        tensors = [
            tensor for tensor in self.model.state_dict().values() if tensor.is_floating_point()
        ]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; only running statistics differ by process."""
        return {
            "model": self.model.state_dict(),
            "model_ema": None if self.model_ema is None else self.model_ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "lr": self._lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        if self.model_ema is not None:
            self.model_ema.module.load_state_dict(state["model_ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self._lr = float(state["lr"])


def create_training_step(
    model: nn.Module,
    compute: Compute,
    device: torch.device,
    *,
    optimizer: OptimConfig | None = None,
    ema: EmaConfig | None = None,
    schedule: ScheduleConfig | None = None,
    total_steps: int = 1,
    global_batch: int = 1,
    world_size: int = 1,
    sync_bn: bool = False,
    grad_checkpointing: bool = False,
    recompute: str | None = None,
    mixes: bool = False,
    skips: bool = False,
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    hooks: StepHooks | None = None,
    say: Callable[[str], object] | None = None,
) -> TrainingStep:
    """Move a new model to its device, and build its training step.

    Without `ema`, no EMA is kept. Without `schedule`, the learning rate is constant. `global_batch`
    is the number of images per optimizer step over all processes. If `world_size` is above 1,
    DistributedDataParallel wraps the model. With `sync_bn` the processes share batch statistics.
    `recompute` is passed to `compile_model`, and `mixes`, `skips` and `hooks` are passed to
    `TrainingStep`. `build_optimizer` builds the optimizer in place of timm. `say` receives messages
    about compilation and CUDA graphs.
    `ConfigError`: timm cannot build the optimizer, or compilation or CUDA graphs are not possible.
    """
    optimizer = optimizer or OptimConfig()
    check_compiled_accumulation(compute.compile, optimizer.accumulate)
    model = move_model(model, compute, device)
    compiles = compute.compile != "none"
    # 'auto' uses no graph with hooks, which a replay skips, or with several processes (untested)
    captures = not grad_checkpointing and hooks is None and world_size == 1
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
    model_ema = None
    if ema is not None and ema.ema_decay > 0:
        from timm.utils import ModelEmaV3

        model_ema = ModelEmaV3(model, decay=ema.ema_decay, use_warmup=ema.ema_warmup)
    if build_optimizer is not None:
        made = build_optimizer(model.parameters())
    else:
        made = optim.create_optimizer(model, optimizer, global_batch, on_gpu=device.type == "cuda")
    capturer = CudaCapturer(device) if graphed else None
    wrapped, no_sync = model, contextlib.nullcontext
    # DistributedDataParallel creates the autograd nodes that accumulate gradients. A node runs on
    # the stream on which it was created, and a capture fails if work runs on another stream.
    with contextlib.nullcontext() if capturer is None else capturer.warming_up():
        if world_size > 1:
            ids = [device] if device.type == "cuda" else None
            wrapped = nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True)
            no_sync = wrapped.no_sync
    step = TrainingStep(
        model,
        made,
        compute,
        device,
        forward=(
            compile_model(wrapped, compute.compile, training=True, recompute=recompute, say=say)
            if compiles
            else wrapped
        ),
        no_sync=no_sync,
        model_ema=model_ema,
        schedule=None if schedule is None else optim.create_schedule(made, schedule, total_steps),
        clip_grad=optimizer.clip_grad,
        mixes=mixes,
        skips=skips,
        hooks=hooks,
    )
    if capturer is not None:
        warmup_runs = WARMUP_RUNS_DDP if world_size > 1 else WARMUP_RUNS
        agree = functools.partial(_agree, device) if world_size > 1 else None
        step.capture_with(capturer, warmup_runs=warmup_runs, agree=agree, say=say)
    return step


def _agree(device: torch.device, holds: bool) -> bool:
    found = torch.tensor(float(holds), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def check_compiled_accumulation(mode: str, accumulate: int) -> None:
    """Raise `ConfigError` for gradient accumulation with CUDA graphs of `torch.compile`.

    The gradients of a micro-batch lie in the memory of a graph, which the next replay overwrites.
    PyTorch then raises an error or returns wrong sums (pytorch issues 169545 and 96693).
    """
    if accumulate > 1 and mode in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--accumulate: PyTorch loses gradients between micro-batches with --compile {mode}:"
            " choose --compile default, with --cuda-graph or without"
        )


def synchronise(model: nn.Module, compiles: bool) -> nn.Module:
    """Synchronise the batch norms of `model` between processes, in place; return the model.

    Norms of class `ABN` can synchronise statistics themselves, also in `tresnet.fused`. But if the
    model has no `ABN`, or is compiled later, its batch norms become PyTorch's `SyncBatchNorm`.
    """
    norms = [module for module in model.modules() if isinstance(module, ABN)]
    if compiles or not norms:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for norm in norms:
        norm.synchronised = True
    return model
