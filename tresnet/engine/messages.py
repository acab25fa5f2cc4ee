"""The lines that a run shows: introduction, figures, warnings and result."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tresnet.data.loaders import usable_cores
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.plan import RunPlan
from tresnet.engine.state import BEST, Progress
from tresnet.measure.memory import MemorySnapshot
from tresnet.steps.inference import describe_implementation

_FIGURES = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.2f} %",
    "val_loss": "val loss {:.4f}",
    "val_top1": "top-1 {:.2f} %",
    "val_top5": "top-5 {:.2f} %",
    "val_map": "mAP {:.2f} %",
    "val_f1": "F1 {:.2f} %",
    "images_per_s": "{:.0f} images/s",
    "data_wait_pct": "waiting {:.0f} %",
    "lr": "lr {:.3g}",
}


def introduction(plan: RunPlan, processes: Processes, run_dir: Path) -> Iterator[str]:
    """Yield the lines that introduce a run."""
    config, splits, batches = plan.config, plan.splits, plan.batches
    began, size = plan.record.identity.world_size, processes.world_size
    per_step = batches.images_per_step
    if began != size:
        yield (
            f"the run began with {began} processes: on {size} a step is"
            f" {batches.accumulate} x {batches.size} images on each"
        )
    yield (
        f"{config.model.model} on {config.data.data}: {len(splits.train)} images to train,"
        f" {len(splits.val)} to validate, {len(splits.classes)} classes; {per_step} images per step"
        f" on each of {size} x {processes.device}, {per_step * size} in all; writing to {run_dir}"
    )
    yield plan.origin
    how = describe_implementation(plan.model, config.compute, processes.device)
    yield f"stages run by {how}"
    if len(splits.classes) == 1 and not config.labels.multi:
        yield (
            f"warning: expected at least 2 classes, got 1 ({splits.classes[0]}): whatever the"
            " model learns, its loss is 0 and its accuracy 100 %"
        )


def figures(values: dict[str, Any], memory: MemorySnapshot) -> str:
    """Return a line of figures and the peak memory, such as `loss 1.2345  top-1 67.89 %`."""
    texts = [
        text.format(values[name]) for name, text in _FIGURES.items() if values.get(name) is not None
    ]
    peak = memory.peak_mib
    return "  ".join([*texts, "" if peak is None else f"{peak:.0f} MiB"])


def stall(waiting_pct: float, workers: int, processes: int) -> str:
    """Return a warning about waiting for data, with the number of workers that would suffice."""
    waiting, cores = waiting_pct / 100, usable_cores()
    busy = min(workers, cores)
    # In a second, the workers load for `busy` seconds in all, or the process for `waiting` seconds.
    # Instead, `needed` workers must load this much during the `1 - waiting` s of computation.
    needed = math.ceil((busy or waiting) / max(1 - waiting, 0.01))
    text = f"data is the bottleneck: {waiting_pct:.0f} % of the time was spent waiting for it"
    if needed * processes <= cores:
        return f"{text}; --workers {needed} would be enough (now {busy})"
    return (
        f"{text}; that would take {needed} workers for each of {processes} processes, but there are"
        f" {cores} cores: try smaller image files or less augmentation"
    )


def result(
    metrics: Metrics | MultiLabelMetrics, progress: Progress, run_dir: Path
) -> Iterator[str]:
    """Yield the last lines of a complete run."""
    yield (
        f"result: {metrics.summary()} on {metrics.images} images with {run_dir / BEST} (epoch"
        f" {progress.best_epoch}; after the last epoch {progress.last_score:.2f} %),"
        f" {progress.elapsed_s:.0f} s of training"
    )
    if progress.skipped or metrics.skipped:
        yield (
            f"unreadable images left out: {len(progress.skipped)} to train, {metrics.skipped} to"
            " validate"
        )
