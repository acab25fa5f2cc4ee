"""Evaluate weights on a data set of images, for eval.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch

from tresnet import env, files
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.classes import class_map, name_numbers, output_order
from tresnet.data.folder import CLASSES_FILE, ImageDataset
from tresnet.data.transforms import eval_sampler
from tresnet.engine import distributed, per_class, splits
from tresnet.engine.config import DEFAULT_THRESHOLD, ImageConfig
from tresnet.engine.console import Console
from tresnet.engine.evaluate import evaluate
from tresnet.engine.per_class import ClassCounter
from tresnet.engine.resolve import default_crop
from tresnet.errors import ConfigError, WriteError, listed
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.settings import Build, DeviceConfig, InferenceCompute
from tresnet.settings.fields import Fraction, Size, check, flatten
from tresnet.steps import InferenceStep
from tresnet.steps.outputs import read_threshold, reordered


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(DeviceConfig, ImageConfig):
    """Evaluate weights on a data set of images."""

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


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluate weights on all processes; print, write and return the result."""
    _check(config)
    weights = open_checkpoint(config.weights).named(class_map(config))
    weights.check_finite()
    thresholds = config.threshold, weights.user.get("threshold"), DEFAULT_THRESHOLD
    chosen = next(value for value in thresholds if value is not None)
    threshold = read_threshold(chosen, weights.classes, weights.num_classes)
    config = dataclasses.replace(
        config,
        model=config.model or weights.config.variant,
        labels=config.labels or weights.user.get("labels", "single"),
        threshold=threshold if isinstance(threshold, float) else config.threshold,
        **default_crop(config, weights.pretrained_cfg),
    )
    multi = config.labels == "multi"
    if config.find_thresholds:
        _check_can_store_thresholds(config.weights, weights, multi)
    with distributed.join(config.device) as processes:
        compute = config.compute.decided(env.capability(processes.device))
        memory = MemoryMeter(processes.device)
        memory.reset_peak()
        transform = eval_sampler(config)
        source = splits.locate(config, processes)
        dataset = splits.open_images(config, source, config.split, transform, multi)
        console = Console(processes.is_main, config.progress)
        named = name_numbers(weights.classes or (), dataset.classes)
        if named != dataset.classes:
            pairs = zip(dataset.classes, named, strict=True)
            examples = listed((f"{number} is {name}" for number, name in pairs), 5)
            console.say(f"labels of the data are numbers of the weights' outputs: {examples}")
            dataset.classes = named
        if dataset.numbered if weights.classes is None else dataset.inferred and multi:
            dataset.relabel(weights.classes or [str(i) for i in range(weights.num_classes)])
        loader = splits.open_loader(config, dataset, config.batch_size, processes, training=False)
        model = create(config.model, weights=weights, **vars(config.build))
        order = _output_order(weights, dataset, config.only_data_classes)
        if len(dataset.classes) < weights.num_classes:
            predicted = f"all {weights.num_classes} can be predicted (--only-data-classes limits"
            predicted += " predictions, as for ImageNet-A and -R)"
            if config.only_data_classes:
                predicted = "only these are predicted, by --only-data-classes"
            console.say(
                f"the data have {len(dataset.classes)} of the weights' {weights.num_classes}"
                f" classes: {predicted}"
            )
        step = InferenceStep(model, compute, processes.device, say=console.say)
        outputs = dataset.classes if order is None else [(weights.classes or ())[i] for i in order]
        lowest = reordered(threshold, order) if multi else None
        counter = None if config.per_class is None else ClassCounter(len(outputs))
        try:
            metrics = evaluate(
                lowest,
                step,
                loader,
                processes,
                order,
                console,
                counter=counter,
                find_thresholds=config.find_thresholds,
            )
        finally:
            loader.close()
        used, result = memory.snapshot(), dataclasses.asdict(metrics)
        if multi:
            result["per_class_ap"] = dict(zip(dataset.classes, result["per_class_ap"], strict=True))
        found = getattr(metrics, "threshold", None)
        if isinstance(found, tuple):
            found = result["threshold"] = dict(zip(outputs, found, strict=True))
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
        options = flatten(dataclasses.replace(config, compute=compute))
        for name in ("output", "per_class", "overwrite", "progress"):
            del options[name]
        result |= {
            "processes": processes.world_size,
            "options": options,
            **used.to_dict(),
            "environment": env.describe(processes.device),
        }
        if counter is not None and config.per_class is not None:
            counts = counter.counts(processes)
            if processes.is_main:
                precisions = getattr(metrics, "per_class_ap", None)
                written = per_class.write(config.per_class, counts, outputs, precisions)
                console.say(f"{config.per_class}: {', '.join(written)}")
        if config.find_thresholds and processes.is_main and isinstance(found, dict):
            indices = range(len(found)) if order is None else order
            by_output = dict(zip(indices, found.values(), strict=True))
            former = torch.tensor(threshold).expand(weights.num_classes).tolist()
            stored = [by_output.get(index, before) for index, before in enumerate(former)]
            metadata = weights.metadata | {"threshold": stored}
            save_checkpoint(create(weights=weights), config.weights, metadata=metadata)
            console.say(f"thresholds of {len(found)} classes stored in {config.weights}")
        if config.output is not None and processes.is_main:
            files.write_text(config.output, json.dumps(result, indent=2) + "\n")
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


def _check_can_store_thresholds(path: str, weights: Checkpoint, multi: bool) -> None:
    if not multi:
        raise ConfigError("--find-thresholds: expected weights of many labels (--labels multi)")
    if not Path(path).is_file() or weights.format != "tresnet":
        raise ConfigError(
            f"--find-thresholds stores the thresholds in the weights: expected a file in the format"
            f" of tresnet, got {path}: make one by tresnet convert {path} OUT.safetensors"
        )


def _output_order(
    weights: Checkpoint, dataset: ImageDataset, only_data_classes: bool
) -> list[int] | None:
    """Return the output of each label of the data, then the other outputs that can be predicted.

    None means that label i is output i, and that all outputs can be predicted.
    """
    try:
        order = output_order(
            weights.classes, weights.num_classes, dataset.classes, not dataset.multi
        )
        if order is None or only_data_classes:
            return order
        return order + sorted(set(range(weights.num_classes)) - set(order))
    except ConfigError as error:
        if not dataset.multi:
            raise
        raise ConfigError(
            f"{error}. If labels are names, only {CLASSES_FILE} can name a class without images:"
            " list all classes there"
        ) from error
