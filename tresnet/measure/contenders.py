"""`tresnet bench train` and `bench infer`: compare models' images per second and peak memory.

The timed step is the step of `train.py` or `eval.py` (`tresnet.steps`), on a synthetic batch that
is already on the device. Peak memory is measured after the warm-up. If a CUDA graph is replayed,
the peak includes the graph's memory pool, but no memory of eager steps. Memory of cases built
earlier (weights, optimizer state, graphs) is subtracted from `allocated`, `reserved` and
`max_allocated`. `device_used` and `rss_peak` include the memory of cases that still exist.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet import devices
from tresnet.measure.cases import BenchCase, build
from tresnet.measure.macs import count_parameters
from tresnet.measure.memory_meter import MemoryMeter, MemorySnapshot
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, Log, NoResultError, Outcome, Rounds, run, timing_on
from tresnet.measure.settings import StepSettings
from tresnet.measure.throughput import clock_for
from tresnet.peers import default_input_shape
from tresnet.settings import Sides, sides
from tresnet.steps import InferenceStep, StepHost, TrainingStep
from tresnet.steps.graph import WARMUP_RUNS
from tresnet.steps.inference import describe_implementation

SETTLE_STEPS = 2  # untimed steps before each measurement
_CLASSES = 1000


def bench_models(
    training: bool, cases: Sequence[BenchCase], settings: StepSettings, log: Log
) -> Outcome:
    """Time training or inference steps of each case (model with settings); record the results."""
    settings.check()
    device = devices.timed_device(settings.device)
    checked = [case.checked(training, devices.capability(device)) for case in cases]
    record = RecordFile(
        settings.output_dir,
        "bench_train" if training else "bench_infer",
        device=device,
        settings={
            **settings.to_dict(),
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        warmup_steps=settings.warmup_steps,
        runs=settings.rounds * settings.steps,
    )
    with timing_on(device):
        primed = _prime(device)
        everyone = [ModelContender(case, training, settings, device, primed) for case in checked]
        groups = [[one] for one in everyone] if settings.sequential else [everyone]
        compiles = any(case.step.compute.compile != "none" for case in checked)
        many = {"rounds": settings.rounds, "compiles": compiles}
        return run(groups, settings, log=log, record=record, **many)


class ModelContender(Contender):
    """Benchmark of the steps of one case, which is a model with its settings."""

    def __init__(
        self,
        case: BenchCase,
        training: bool,
        settings: StepSettings,
        device: torch.device,
        primed: MemorySnapshot,
    ) -> None:
        self._case, self._training, self._settings = case, training, settings
        self._device, self._primed = device, primed
        self._clock, self._meter = clock_for(device), MemoryMeter(device)
        self._step: Callable[[], Tensor] | None = None
        self.label = case.label(training)
        self.units = case.batch_size * case.step.optim.accumulate
        self.columns: dict[str, Any] = {
            "model": case.model,
            **case.columns(),
            "parameters": None,
            "warmup_s": None,
            "replayed": None,
            "implementation": None,
            **MemorySnapshot().to_dict(),
        }

    def set_up(self) -> None:
        """Build the model, warm up, and measure the peak memory of steps after the warm-up."""
        self._meter.reset_peak()
        before, began_s = self._meter.snapshot(), time.perf_counter()
        ready = prepare(self._case, self._training, self._device)
        compute = self._case.step.compute
        graphs = self._device.type == "cuda" and compute.cuda_graph != "off"
        before_replays = WARMUP_RUNS + 1 if graphs else 0
        with inductor_options(self._case):
            # Graphs are captured here, so that timed steps only replay graphs.
            for _ in range(max(self._settings.warmup_steps, before_replays)):
                ready.run()
        self._clock.wait(self._clock.mark())
        self.columns |= {
            "warmup_s": time.perf_counter() - began_s,
            "input_size": ready.input_size,
            "parameters": count_parameters(ready.model),
            "implementation": describe_implementation(ready.model, compute, self._device),
        }
        torch.cuda.empty_cache()  # cuDNN's search may have reserved more than a step needs
        self._meter.reset_peak()
        self._step = ready.run
        self._run_untimed()
        self.columns["replayed"] = ready.step.replayed
        self._clock.wait(self._clock.mark())
        self.columns |= _own_memory(self._meter.snapshot(), before, self._primed).to_dict()

    def visit(self) -> Sequence[float]:
        assert self._step is not None, "`set_up` was called"
        torch.cuda.empty_cache()  # so that no timed step must free unused memory
        output = self._run_untimed()
        marks = [self._clock.mark()]
        for _ in range(self._settings.steps):
            output = self._step()
            marks.append(self._clock.mark())
        self._clock.wait(marks[-1])
        if not math.isfinite(float(output.float().sum())):
            raise NoResultError("not_finite", "the loss or output is not finite")
        return [self._clock.seconds(begin, end) for begin, end in itertools.pairwise(marks)]

    def _run_untimed(self) -> Tensor:
        assert self._step is not None, "`set_up` was called"
        for _ in range(SETTLE_STEPS - 1):
            self._step()
        return self._step()

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Return percentiles of images/s over all steps, and the median of each round."""
        times_s = [time_s for visit in rounds for time_s in visit]
        return {
            **speed(times_s, self.units),
            "round_p50_images_per_s": [
                speed(visit, self.units)["p50_images_per_s"] for visit in rounds if visit
            ],
        }

    def close(self) -> None:
        self._step = None


def speed(times_s: Sequence[float], images: float) -> dict[str, float | None]:
    """Return the 20th, 50th and 80th percentile of images/s over steps of `images` images."""
    names = ("p20_images_per_s", "p50_images_per_s", "p80_images_per_s")
    if not times_s:
        return {**dict.fromkeys(names), "p50_step_time_ms": None}
    percentiles_s = [float(value) for value in np.percentile(times_s, (80, 50, 20))]
    return {
        **{name: images / time_s for name, time_s in zip(names, percentiles_s, strict=True)},
        "p50_step_time_ms": percentiles_s[1] * 1000,
    }


class Prepared(NamedTuple):
    """Step with its batch; `run()` executes the step and returns the loss or logits."""

    run: Callable[[], Tensor]
    model: nn.Module
    input_size: Sides
    step: TrainingStep | InferenceStep


def prepare(case: BenchCase, training: bool, device: torch.device) -> Prepared:
    """Build the model, the batch and the step of a checked case on `device`."""
    torch.manual_seed(0)  # every case gets the same images
    model = build(case)
    if getattr(model, "aux_logits", False):  # torchvision's GoogLeNet and Inception
        # Concatenate the logits of all heads, also of auxiliary ones: (heads * N, classes).
        model.register_forward_hook(
            lambda *call: call[-1] if isinstance(call[-1], Tensor) else torch.cat([*call[-1]])
        )
    size = case.input_size or default_input_shape(model)[-1]
    # Before the batch is on the device, because eval.py too folds norms without a batch there.
    if training:
        step = TrainingStep(model, case.step, StepHost(device=device))
    else:
        step = InferenceStep(model, case.step.compute, device)
    shape = (case.batch_size, 3, *sides(size))
    classes = getattr(model, "num_classes", _CLASSES)
    labels = torch.randint(classes, (case.batch_size,), device=device)
    if case.input == "uint8":
        raw = torch.randint(256, shape, dtype=torch.uint8)
    else:
        raw = torch.rand(shape)
    raw = raw.to(device).contiguous(memory_format=case.step.compute.memory_format)
    images = functools.partial(step.feed.images, raw)
    if case.input == "float":  # converted once; uint8 images are converted in each step
        floats = images()
        images = lambda: floats  # noqa: E731
    if isinstance(step, InferenceStep):
        return Prepared(lambda: step(images()), step.model, size, step)
    numbers, count = itertools.count(1), case.step.optim.accumulate

    def train() -> Tensor:
        loss = labels
        for left in reversed(range(count)):
            loss, _ = step.backward(
                images(), labels, _cross_entropy, micro_batches=count, is_last=left == 0
            )
        step.optimizer_step(next(numbers))
        return loss

    return Prepared(train, model, size, step)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if len(logits) > len(labels):  # with auxiliary heads
        labels = labels.repeat(len(logits) // len(labels))
    return functional.cross_entropy(logits, labels)


def inductor_options(case: BenchCase) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that sets the case's options of the Inductor compiler."""
    if not case.layout_opt:
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch(force_layout_optimization=True)


def _prime(device: torch.device) -> MemorySnapshot:
    """Allocate cuBLAS's workspaces, which all cases share; return a snapshot of the memory."""
    if device.type == "cuda":
        # An earlier run in this process may have left workspaces of its graphs' streams: 192 MiB in
        # bench_train_h200_torch2.11.0_2026-11-26_2.json, after three graphs.
        torch._C._cuda_clearCublasWorkspaces()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            block = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
            (block @ block).sum().backward()
        torch.cuda.synchronize(device)
        del block
        torch.cuda.empty_cache()
    meter = MemoryMeter(device)
    meter.reset_peak()
    return meter.snapshot()


def _own_memory(
    after: MemorySnapshot, before: MemorySnapshot, primed: MemorySnapshot
) -> MemorySnapshot:
    """Subtract the memory of earlier cases (`before` minus `primed`) from the snapshot `after`.

    `before` and `primed` directly follow a reset of the peak, so their peak is the memory in use.
    """
    columns = {}
    for name in ("allocated", "max_allocated", "reserved"):
        now, earlier, shared = (getattr(snapshot, name) for snapshot in (after, before, primed))
        columns[name] = now if None in (now, earlier, shared) else now - max(0, earlier - shared)
    if columns["reserved"] is not None:
        # Small tensors also fill gaps in what earlier cases reserved (29 of 6,697 MiB on an H200).
        columns["reserved"] = max(columns["reserved"], columns["max_allocated"] or 0)
    return after._replace(**columns)
