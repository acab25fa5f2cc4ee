"""Evaluate weights on a data set of images, for eval.py."""

import contextlib
import csv
import dataclasses
import functools
import gc
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from torch import nn

from tresnet import devices, environment, writing
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.channels import ImageReader
from tresnet.data.dataset import ImageDataset
from tresnet.data.labels import class_map, match
from tresnet.data.transforms import eval_sampler
from tresnet.engine import distributed, per_class, splits
from tresnet.engine.config import DEFAULT_THRESHOLD, ImageConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.per_class import ClassCounter
from tresnet.engine.resolve import default_crop
from tresnet.errors import ConfigError, OutputError, TResNetError, WriteError, listed
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.models.tresnet import TResNet
from tresnet.peers import TIMM, Pretrained, open_pretrained
from tresnet.settings import Build, DeviceName, InferenceCompute
from tresnet.settings.fields import Fraction, Size, check, flatten
from tresnet.steps import InferenceStep
from tresnet.steps.outputs import Threshold, read_threshold, reordered

# Columns of the table of several weights, with their formats, and of its CSV file.
_SHOWN = {
    "weights": "", "input_size": "", "top1": ".2f", "top5": ".2f", "map": ".2f", "f1_micro": ".2f",
    "images_per_s": ".0f", "max_allocated_mib": ".0f", "rss_peak_mib": ".0f", "parameters": ",",
    "error": "",
}  # fmt: skip
_COLUMNS = (
    *("weights", "model", "input_size", "crop_pct", "crop_mode", "interpolation", "images"),
    *("skipped", "loss", "top1", "top5", "map", "f1_micro", "f1_macro", "images_per_s"),
    *("allocated_mib", "reserved_mib", "max_allocated_mib", "device_used_mib", "rss_peak_mib"),
    *("parameters", "error"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(ImageConfig):
    """Evaluate weights on a data set of images."""

    device: DeviceName = "auto"
    data: str = dataclasses.field()
    """Directory with image folders val/CLASS/, with val.csv (header image,label; or for several
    labels per image, image,labels), or with a Hugging Face data set. Or hf-hub:USER/NAME, a URL
    (s3://...), digits, or digits_multilabel."""
    weights: Annotated[str | tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")]
    """Weights: a tag of `tresnet list`, a file, a folder in timm's layout, hf-hub:USER/NAME, or
    timm:NAME, a pretrained model of timm without options of ours. Several names: a table
    compares them, each at its own image size, crop and normalisation."""
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
    """JSON file to write the result to; with several --weights, a list of results."""
    csv: Path | None = None
    """For several --weights: CSV file to write the table to, with more columns."""
    per_class: Path | None = None
    """Directory for per_class.csv (images, accuracy or average precision, precision, recall and F1
    of each class), confusion.csv and, with matplotlib, confusion.png (the confusion matrix)."""
    overwrite: bool = False
    """Replace the files of --output, --csv and --per-class if they exist."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Images to evaluate, and the model's outputs that are compared with their labels."""

    images: ImageDataset
    order: list[int] | None  # output of each class of the data, then of others; None: as they are
    names: list[str]  # classes of these outputs


class _UnpreparedError(TResNetError):
    """An evaluation could not be prepared on a process; all processes raise it."""


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluate weights on all processes; print, write and return the result."""
    _check(config)
    with distributed.join(config.device, config.progress) as processes:
        result, _ = _evaluate(config, processes)
        _write(config, result, processes)
        return result


def compare(config: EvalConfig, show: Callable[[list[str], list[list[str]]], object]) -> bool:
    """Evaluate several weights; return whether all could be. `show` gets a table's header and rows.

    The row of weights that fail has the reason. --csv and --output are written after each of them.
    With several processes, an error of the preparation on any of them becomes the row of all, and
    so do outputs that are not finite. Other errors end the comparison, because the processes would
    go on to different weights.
    """
    _check(config)
    with distributed.join(config.device, config.progress) as processes:
        rows, results = [], []
        expected: tuple[type[Exception], ...] = (Exception,)
        together: _Together = contextlib.nullcontext
        if processes.world_size > 1:
            expected = (_UnpreparedError, OutputError)
            together = functools.partial(_together, processes)
        for name in config.weights:
            row: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"weights": name}
            try:
                one = dataclasses.replace(config, weights=name)
                result, row["parameters"] = _evaluate(one, processes, together)
                values = result | result["options"]
                row |= {key: value for key, value in values.items() if key in _COLUMNS}
            except expected as error:
                result = {"weights": name, "error": _reason(error)}
                row["error"] = result["error"]
                processes.console.say(f"{name}: {result['error']}")
            gc.collect()  # of this model and of an error's frames, which may be in cycles
            torch.cuda.empty_cache()
            if config.compute.compile != "none":
                torch.compiler.reset()  # else many models exceed its limits of recompilation
            rows.append(row)
            results.append(result)
            _write(config, results, processes)
            if config.csv is not None and processes.is_main:
                writing.write_text(config.csv, _csv_text(rows))
        if processes.is_main:
            used = [key for key in _SHOWN if any(row[key] is not None for row in rows)]
            show(used, [[_shown(row[key], _SHOWN[key]) for key in used] for row in rows])
        return not any(row["error"] for row in rows)


# What makes the context in which processes prepare an evaluation.
_Together = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _together(processes: Processes) -> Iterator[None]:
    """Raise `_UnpreparedError` on all processes if the block fails on any (a collective).

    The block has no collectives.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    ranks: dict[str, list[int]] = {}
    reasons = processes.gather(None if own is None else _reason(own))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(rank)
    if ranks:
        texts = [f"process {listed(each, 8)}: {reason}" for reason, each in ranks.items()]
        alike = len(ranks) == 1 and None not in reasons
        raise _UnpreparedError(next(iter(ranks)) if alike else "; ".join(texts)) from own


def _reason(error: Exception) -> str:
    """Return type and message of an error, in one line."""
    text = str(error) if isinstance(error, _UnpreparedError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _shown(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec) if spec else str(value)


def _csv_text(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(config: EvalConfig, result: Any, processes: Processes) -> None:
    if config.output is not None and processes.is_main:
        writing.write_text(config.output, json.dumps(result, indent=2) + "\n")
    elif (broken := processes.console.broken) is not None:
        raise WriteError(
            f"cannot show the result on standard output: {broken.strerror}: write it to a file by"
            " --output"
        )


def _evaluate(
    config: EvalConfig,
    processes: Processes,
    together: _Together = contextlib.nullcontext,
) -> tuple[dict[str, Any], int]:
    """Evaluate one model (a collective): print and return its result, and count its parameters.

    Whatever may fail on one process alone, before the images are evaluated, is in `together()`.
    """
    say = processes.console.say
    with together():
        weights = _open_weights(config)
        config, threshold = _resolve(config, weights, processes.device)
        memory = MemoryMeter(processes.device)
        memory.reset_peak()
    source = splits.locate(config, processes)  # with a collective, so not in `together()`
    with contextlib.ExitStack() as stack:
        with together():
            task = _open(config, source, weights, say)
            if isinstance(weights, Pretrained):
                model = weights.model
            else:
                model = create(config.model, weights=weights, **vars(config.build))
            parameters = sum(parameter.numel() for parameter in model.parameters())
            loader = splits.open_loader(
                config, task.images, config.batch_size, processes, training=False
            )
            stack.callback(loader.close)
            step = _step(config, model, processes.device, say)
        counter = None if config.per_class is None else ClassCounter(len(task.names))
        lowest = reordered(threshold, task.order) if config.labels == "multi" else None
        options = {"counter": counter, "find_thresholds": config.find_thresholds}
        metrics = evaluate(lowest, step, loader, processes, task.order, **options)
    del step  # its buffers are not part of the model's memory
    used = memory.snapshot()
    result: dict[str, Any] = _result(config, metrics, task, processes) | used.to_dict()
    found = result.get("threshold")
    for name, value in result.get("per_class_ap", {}).items():
        precision = "none" if value is None else f"{value:.2f} %"
        at = f", threshold {found[name]:.4g}" if isinstance(found, dict) else ""
        say(f"average precision {precision}{at}: {name}")
    rate = "" if metrics.images_per_s is None else f", {metrics.images_per_s:.0f} images/s"
    skipped = f", {metrics.skipped} unreadable left out" if metrics.skipped else ""
    say(
        f"{config.weights} on {config.data}/{config.split}: {metrics.summary()} on"
        f" {metrics.images} images{skipped}{rate}, memory: {used.format()}"
    )
    if counter is not None and config.per_class is not None:
        counts = counter.counts(processes)
        if processes.is_main:
            precisions = getattr(metrics, "per_class_ap", None)
            written = per_class.write(config.per_class, counts, task.names, precisions)
            say(f"{config.per_class}: {', '.join(written)}")
    if config.find_thresholds and processes.is_main and isinstance(found, dict):
        assert isinstance(weights, Checkpoint), "checked by _check_can_store_thresholds"
        _store(str(config.weights), weights, found.values(), task.order, threshold)
        say(f"thresholds of {len(found)} classes stored in {config.weights}")
    return result, parameters


def _open_weights(config: EvalConfig) -> Checkpoint | Pretrained:
    name, names = str(config.weights), class_map(config.class_map)
    if name.startswith(TIMM):
        if config.model is not None:
            raise ConfigError(f"--model: {name} names its model: leave the option out")
        return open_pretrained(name, names)
    weights = open_checkpoint(name).named(names)
    weights.check_finite()
    return weights


def _check(config: EvalConfig) -> None:
    check(config)
    tables, several = config.per_class, not isinstance(config.weights, str)
    alone = {"--model": config.model, "--per-class": tables}
    alone["--find-thresholds"] = config.find_thresholds or None
    for option, value in alone.items() if several else [("--csv", config.csv)]:
        if value is not None:
            expected = "one name" if several else "several names"
            raise ConfigError(f"{option}: expected {expected} in --weights, got {config.weights}")
    if not config.weights:
        raise ConfigError("--weights: expected at least one name, got none")
    if tables is not None and tables.exists() and not tables.is_dir():
        raise ConfigError(f"--per-class: expected a directory, got the file {tables}")
    for option, path, names in (
        ("--output", config.output, ("",)),
        ("--csv", config.csv, ("",)),
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


def _resolve(
    config: EvalConfig, weights: Checkpoint | Pretrained, device: torch.device
) -> tuple[EvalConfig, Threshold]:
    """Fill in what weights and device decide; return also the threshold of all outputs, or each."""
    thresholds = config.threshold, weights.user.get("threshold"), DEFAULT_THRESHOLD
    chosen = next(value for value in thresholds if value is not None)
    threshold = read_threshold(chosen, weights.classes, weights.num_classes)
    labels = config.labels or weights.labels
    if config.find_thresholds:
        _check_can_store_thresholds(str(config.weights), weights, labels == "multi")
    config = dataclasses.replace(
        config,
        model=config.model
        or (weights.name if isinstance(weights, Pretrained) else weights.config.variant),
        labels=labels,
        compute=config.compute.decided(devices.capability(device)),
        threshold=threshold if isinstance(threshold, float) else config.threshold,
        **default_crop(config, weights.pretrained_cfg),
    )
    return config, threshold


def _check_can_store_thresholds(path: str, weights: Any, multi: bool) -> None:
    if not multi:
        raise ConfigError("--find-thresholds: expected weights of many labels (--labels multi)")
    if not Path(path).is_file() or weights.format != "tresnet":
        raise ConfigError(
            f"--find-thresholds stores the thresholds in the weights: expected a file in the format"
            f" of tresnet, got {path}: make one by tresnet convert {path} OUT.safetensors"
        )


def _open(
    config: EvalConfig, source: str, weights: Checkpoint | Pretrained, say: Callable[[str], object]
) -> _Task:
    """Open the images, and match their labels with the outputs; say what was guessed."""
    several = config.labels == "multi"
    options = {"multi": several, "reader": ImageReader.of(weights.name, weights.pretrained_cfg)}
    images = splits.open_images(config, source, config.split, eval_sampler(config), **options)
    labels, count = images.labels, weights.num_classes
    if labels.reading:
        say(labels.describe())
    found = match(
        labels.names,
        weights.classes or count,
        "outputs",
        numbered=labels.numbered,
        whole=several and labels.listed,
    )
    if found.names != labels.names:
        pairs = zip(labels.names, found.names, strict=True)
        examples = listed((f"{number} is {name}" for number, name in pairs), 5)
        say(f"labels of the data are numbers of the weights' outputs: {examples}")
        labels = dataclasses.replace(labels, names=found.names)
    if len(labels.names) < count:
        predicted = f"all {count} can be predicted (--only-data-classes limits predictions, as for"
        predicted += " ImageNet-A and -R)"
        if several:
            predicted = "the others have no average precision"
        elif config.only_data_classes:
            predicted = "only these are predicted, by --only-data-classes"
        lacking = f"the data have {len(labels.names)} of the weights' {count} classes"
        say(f"{lacking}: {predicted}")
    order = found.order
    if several and not labels.listed and found.outputs is not None:
        labels, order = labels.arranged(found.outputs), None  # images lack the other classes
    names = list(labels.names)
    if order is not None and not config.only_data_classes:
        others = sorted(set(range(count)) - set(order))
        order = order + others
        names += [(found.outputs or ())[i] for i in others]
    return _Task(dataclasses.replace(images, labels=labels), order, names)


def _step(
    config: EvalConfig, model: nn.Module, device: torch.device, say: Callable[[str], object]
) -> InferenceStep:
    compute, cfg = config.compute, model.pretrained_cfg
    if not isinstance(model, TResNet):
        compute = dataclasses.replace(compute, fold=False)
    return InferenceStep(model, compute, device, say=say, normalised_by=cast(Any, cfg))


def _result(
    config: EvalConfig, metrics: Metrics | MultiLabelMetrics, task: _Task, processes: Processes
) -> dict[str, Any]:
    result: dict[str, Any] = dataclasses.asdict(metrics)
    if isinstance(metrics, MultiLabelMetrics):
        classes = task.images.classes
        result["per_class_ap"] = dict(zip(classes, metrics.per_class_ap, strict=True))
        if isinstance(metrics.threshold, tuple):
            result["threshold"] = dict(zip(task.names, metrics.threshold, strict=True))
    options = flatten(config)
    for name in ("output", "csv", "per_class", "overwrite", "progress"):
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
    save_checkpoint(model, path, metadata=weights.user | {"threshold": values})
