"""Evaluate weights on a data set of images, for eval.py."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from tresnet import devices, environment, writing
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.dataset import ImageDataset
from tresnet.data.labels import Outputs, class_map, match
from tresnet.data.transforms import eval_sampler
from tresnet.engine import distributed, per_class, splits
from tresnet.engine.config import DEFAULT_THRESHOLD, ImageConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.per_class import ClassCounter
from tresnet.engine.resolve import default_crop
from tresnet.errors import ConfigError, WriteError, listed
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.settings import Build, DeviceName, InferenceCompute
from tresnet.settings.fields import Fraction, Size, check, flatten
from tresnet.steps import InferenceStep
from tresnet.steps.outputs import Threshold, read_threshold, reordered


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(ImageConfig):
    """Evaluate weights on a data set of images."""

    device: DeviceName = "auto"
    data: str = dataclasses.field()
    """Directory with image folders val/CLASS/, with val.csv (header image,label; or for several
    labels per image, image,labels), or with a Hugging Face data set. Or hf-hub:USER/NAME, a URL
    (s3://...), digits, or digits_multilabel."""
    weights: str
    """Weights: a tag of `tresnet list`, a file, a folder in timm's layout or hf-hub:USER/NAME."""
    model: str | None = None
    """Name of the model, such as tresnet_m. None: the model of the weights."""
    labels: Literal["single", "multi"] | None = None
    """single: one label per image, from class folders. multi: any number of labels, from SPLIT.csv
    or COCO's JSON. None: the value saved with the weights, or single."""
    threshold: Fraction | str | None = None
    """Lowest probability at which a label counts as predicted, when F1 is computed: a number, or a
    JSON file with one for each class. None: what the weights hold, or 0.5."""
    find_thresholds: bool = False
    """For many labels: find each class's threshold of the highest F1 on the split, and store the
    thresholds in the file of --weights, from which predict, demo, export and push take them."""
    only_data_classes: bool = False
    """Predict only classes that the data have, as results on ImageNet-A, ImageNet-R and other
    subsets of ImageNet are computed. By default all classes of the weights can be predicted."""
    split: str = "val"
    """Name of the split to evaluate, such as val."""
    batch_size: Size = 128
    """Images per forward pass of each process or GPU."""
    build: Build = dataclasses.field(default_factory=Build)
    compute: InferenceCompute = dataclasses.field(default_factory=InferenceCompute)
    progress: bool = True
    """Show a progress bar if standard error is a terminal."""
    output: Path | None = None
    """JSON file to write the result to."""
    per_class: Path | None = None
    """Directory for per_class.csv (images, accuracy or average precision, precision, recall and F1
    of each class), confusion.csv and, with matplotlib, confusion.png (the confusion matrix)."""
    overwrite: bool = False
    """Replace the files of --output and --per-class if they exist."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Images to evaluate, and the model's outputs that are compared with their labels."""

    images: ImageDataset
    order: list[int] | None  # output of each class of the data, then of others; None: as they are
    names: list[str]  # classes of these outputs


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluate weights on all processes; print, write and return the result."""
    _check(config)
    weights = open_checkpoint(config.weights).named(class_map(config.class_map))
    weights.check_finite()
    config, threshold = _resolve(config, weights)
    with distributed.join(config.device) as processes:
        console = Console(processes.is_main, config.progress)
        memory = MemoryMeter(processes.device)
        memory.reset_peak()
        task = _open(config, weights, processes, console)
        metrics, counter = _measure(config, weights, task, threshold, processes, console)
        used = memory.snapshot()
        result: dict[str, Any] = _result(config, metrics, task, processes) | used.to_dict()
        found = result.get("threshold")
        for name, value in result.get("per_class_ap", {}).items():
            precision = "none" if value is None else f"{value:.2f} %"
            at = f", threshold {found[name]:.4g}" if isinstance(found, dict) else ""
            console.say(f"average precision {precision}{at}: {name}")
        rate = "" if metrics.images_per_s is None else f", {metrics.images_per_s:.0f} images/s"
        skipped = f", {metrics.skipped} unreadable left out" if metrics.skipped else ""
        console.say(
            f"{config.weights} on {config.data}/{config.split}: {metrics.summary()} on"
            f" {metrics.images} images{skipped}{rate}, memory: {used.format()}"
        )
        if counter is not None and config.per_class is not None:
            counts = counter.counts(processes)
            if processes.is_main:
                precisions = getattr(metrics, "per_class_ap", None)
                written = per_class.write(config.per_class, counts, task.names, precisions)
                console.say(f"{config.per_class}: {', '.join(written)}")
        if config.find_thresholds and processes.is_main and isinstance(found, dict):
            _store(config.weights, weights, found.values(), task.order, threshold)
            console.say(f"thresholds of {len(found)} classes stored in {config.weights}")
        if config.output is not None and processes.is_main:
            writing.write_text(config.output, json.dumps(result, indent=2) + "\n")
        elif console.broken is not None:
            raise WriteError(
                f"cannot show the result on standard output: {console.broken.strerror}: write it to"
                " a file by --output"
            )
        return result


def _check(config: EvalConfig) -> None:
    check(config)
    tables = config.per_class
    if tables is not None and tables.exists() and not tables.is_dir():
        raise ConfigError(f"--per-class: expected a directory, got the file {tables}")
    for option, path, names in (
        ("--output", config.output, ("",)),
        ("--per-class", tables, per_class.FILES),
    ):
        if path is None:
            continue
        existing = [file for name in names if (file := path / name).exists()]
        if existing and not config.overwrite:
            raise ConfigError(
                f"{option}: {existing[0]} exists: choose another name, or add --overwrite"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: there is no directory {path.parent}")


def _resolve(config: EvalConfig, weights: Checkpoint) -> tuple[EvalConfig, Threshold]:
    """Fill in what the weights decide; return also the threshold of all outputs, or of each."""
    thresholds = config.threshold, weights.user.get("threshold"), DEFAULT_THRESHOLD
    chosen = next(value for value in thresholds if value is not None)
    threshold = read_threshold(chosen, weights.classes, weights.num_classes)
    labels = config.labels or weights.user.get("labels", "single")
    if config.find_thresholds:
        _check_can_store_thresholds(config.weights, weights, labels == "multi")
    config = dataclasses.replace(
        config,
        model=config.model or weights.config.variant,
        labels=labels,
        threshold=threshold if isinstance(threshold, float) else config.threshold,
        **default_crop(config, weights.pretrained_cfg),
    )
    return config, threshold


def _check_can_store_thresholds(path: str, weights: Checkpoint, multi: bool) -> None:
    if not multi:
        raise ConfigError("--find-thresholds: expected weights of many labels (--labels multi)")
    if not Path(path).is_file() or weights.format != "tresnet":
        raise ConfigError(
            f"--find-thresholds stores the thresholds in the weights: expected a file in the format"
            f" of tresnet, got {path}: make one by tresnet convert {path} OUT.safetensors"
        )


def _open(config: EvalConfig, weights: Checkpoint, processes: Processes, console: Console) -> _Task:
    """Open the images, and match their labels with the outputs; say what was guessed."""
    source, several = splits.locate(config, processes), config.labels == "multi"
    images = splits.open_images(config, source, config.split, eval_sampler(config), several)
    labels, count = images.labels, weights.num_classes
    if labels.reading:
        console.say(labels.describe())
    found = match(
        labels.names,
        Outputs(count, weights.classes),
        "outputs",
        numbered=labels.numbered,
        whole=several and labels.listed,
    )
    if found.names != labels.names:
        pairs = zip(labels.names, found.names, strict=True)
        examples = listed((f"{number} is {name}" for number, name in pairs), 5)
        console.say(f"labels of the data are numbers of the weights' outputs: {examples}")
        labels = dataclasses.replace(labels, names=found.names)
    if len(labels.names) < count:
        predicted = f"all {count} can be predicted (--only-data-classes limits predictions, as for"
        predicted += " ImageNet-A and -R)"
        if several:
            predicted = "the others have no average precision"
        elif config.only_data_classes:
            predicted = "only these are predicted, by --only-data-classes"
        lacking = f"the data have {len(labels.names)} of the weights' {count} classes"
        console.say(f"{lacking}: {predicted}")
    order = found.order
    if several and not labels.listed and found.outputs is not None:
        labels, order = labels.arranged(found.outputs), None  # images lack the other classes
    names = list(labels.names)
    if order is not None and not config.only_data_classes:
        others = sorted(set(range(count)) - set(order))
        order = order + others
        names += [(found.outputs or ())[i] for i in others]
    return _Task(dataclasses.replace(images, labels=labels), order, names)


def _measure(
    config: EvalConfig,
    weights: Checkpoint,
    task: _Task,
    threshold: Threshold,
    processes: Processes,
    console: Console,
) -> tuple[Metrics | MultiLabelMetrics, ClassCounter | None]:
    """Build the model, and evaluate it on the images."""
    device = processes.device
    loader = splits.open_loader(config, task.images, config.batch_size, processes, training=False)
    model = create(config.model, weights=weights, **vars(config.build))
    compute = config.compute.decided(devices.capability(device))
    step = InferenceStep(model, compute, device, say=console.say)
    lowest = reordered(threshold, task.order) if config.labels == "multi" else None
    counter = None if config.per_class is None else ClassCounter(len(task.names))
    try:
        metrics = evaluate(
            lowest,
            step,
            loader,
            processes,
            task.order,
            console,
            counter=counter,
            find_thresholds=config.find_thresholds,
        )
    finally:
        loader.close()
    return metrics, counter


def _result(
    config: EvalConfig, metrics: Metrics | MultiLabelMetrics, task: _Task, processes: Processes
) -> dict[str, Any]:
    """Return the metrics, and what was measured on what."""
    result: dict[str, Any] = dataclasses.asdict(metrics)
    if isinstance(metrics, MultiLabelMetrics):
        classes = task.images.classes
        result["per_class_ap"] = dict(zip(classes, metrics.per_class_ap, strict=True))
        if isinstance(metrics.threshold, tuple):
            result["threshold"] = dict(zip(task.names, metrics.threshold, strict=True))
    compute = config.compute.decided(devices.capability(processes.device))
    options = flatten(dataclasses.replace(config, compute=compute))
    for name in ("output", "per_class", "overwrite", "progress"):
        del options[name]
    return result | {
        "processes": processes.world_size,
        "options": options,
        "environment": environment.describe(processes.device),
    }


def _store(
    path: str,
    weights: Checkpoint,
    thresholds: Iterable[float],
    order: list[int] | None,
    former: Threshold,
) -> None:
    """Save the weights again, with the thresholds of the outputs `order` (None: all)."""
    values = torch.tensor(former, dtype=torch.float64).expand(weights.num_classes).tolist()
    for output, value in zip(order or range(len(values)), thresholds, strict=False):
        values[output] = value
    dtype = next(tensor.dtype for tensor in weights.tensors.values() if tensor.is_floating_point())
    model = create(weights=weights, dtype=dtype)
    save_checkpoint(model, path, metadata=weights.metadata | {"threshold": values})
