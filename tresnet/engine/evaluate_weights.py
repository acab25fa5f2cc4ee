"""Evaluation of weights on a folder of images: what eval.py does."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tresnet import env, files
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.weights import OpenWeights, open_weights
from tresnet.data import ImageDataset, create_loader, eval_transform
from tresnet.data.folder import CLASSES_FILE
from tresnet.engine import distributed, fields, images
from tresnet.engine.config import LabelConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.resolve import class_map
from tresnet.errors import ConfigError, WriteError
from tresnet.measure.memory import MemoryMeter, MemorySnapshot
from tresnet.steps import InferenceCompute, InferenceStep


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluate weights on the images of a folder, or on the digits."""

    data: str
    """Directory with val/CLASS/ image folders or val.csv, or `digits` or `digits_multilabel`."""
    weights: str
    """A tag of `tresnet list`, or a file of weights."""
    model: str | None = None
    """Variant, where the weights do not say which they are."""
    labels: Literal["single", "multi"] | None = None
    """One label an image, in class folders, or any number, in SPLIT.csv or COCO's JSON. None: as
    the weights were trained."""
    threshold: float = 0.5
    """Probability from which a label counts as predicted, for F1."""
    split: str = "val"
    """Sub-directory of the data."""
    data_root: str = "data"
    """Directory in which `digits` is written."""
    batch_size: int = 128
    """Images per process (per GPU) and forward pass."""
    input_size: int | None = None
    """Height and width of the input in pixels. None: as the weights were made for."""
    crop_pct: float | None = None
    """Share of the resized image that is kept. None: as the weights were made for."""
    crop_mode: Literal["center", "squash"] | None = None
    """Cut out the middle, or squash to a square. None: as the weights were made for."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Resampling filter. None: as the weights were made for."""
    workers: int = 4
    """Processes that load images, per evaluating process."""
    skip_bad_images: bool = False
    """Count unreadable images and go on, instead of stopping."""
    norm: Literal["abn", "batchnorm", "inplace_abn"] = "abn"
    """Implementation of batch norm + activation."""
    impl: Literal["auto", "triton", "reference"] = "auto"
    """What computes the norms: Triton kernels, or plain operators."""
    pad: bool = False
    """Widths in multiples of 8, as tensor cores want them: the same outputs."""
    jit: bool = False
    """Use the scripted helper functions."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    compute: InferenceCompute = dataclasses.field(default_factory=InferenceCompute)
    progress: bool = True
    """Show a progress bar, if the output is a terminal."""
    output: Path | None = None
    """Write the result to this JSON file."""
    overwrite: bool = False
    """Replace the output file if it exists."""


def run(config: EvalConfig) -> dict[str, Any]:
    """Evaluate, show the result and write it; under torchrun, with its other processes.

    Returns:
        The result as it is written: metrics, memory, what was evaluated and how, the environment.

    Raises:
        ConfigError: An option does not fit, the output exists, or the classes differ.
        CheckpointError: The weights cannot be read or do not fit the model.
        DataError: The data set is incomplete or holds files that are not images.
        WriteError: The result cannot be written, neither to the output nor to the screen.
    """
    _check(config)
    opened = open_weights(config.weights)
    opened.check_finite()
    config = _completed(config, opened)
    with distributed.join(config.device) as processes:
        memory = MemoryMeter(processes.device)
        memory.reset_peak()
        folder = images.locate(config.data, config.data_root, processes)
        dataset = _open(config, folder)
        model = create(
            config.model,
            weights=opened,
            norm=config.norm,
            jit=config.jit,
            impl=config.impl,
            pad=config.pad,
        )
        mapping = _class_map(opened.info.classes, _outputs(model), dataset)
        console = Console(processes.is_main, config.progress)
        metrics = _measure(config, model, dataset, mapping, processes, console)
        used = memory.snapshot()
        console.say(_line(config, metrics, used))
        result = _result(config, metrics, processes) | used.to_dict()
        result["environment"] = env.describe(processes.device)
        if config.output is not None and processes.is_main:
            files.write_text(config.output, json.dumps(result, indent=2) + "\n")
        elif console.broken is not None:
            raise WriteError(
                f"cannot show the result on standard output: {console.broken.strerror}: write it to"
                " a file by --output"
            )
        return result


def _check(config: EvalConfig) -> None:
    for name in ("batch_size", "input_size"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{fields.option(name)}: expected at least 1, got {value}")
    if not 0 <= config.threshold <= 1:
        raise ConfigError(f"--threshold: expected 0 to 1, got {config.threshold}")
    if config.workers < 0:
        raise ConfigError(f"--workers: expected 0 or more, got {config.workers}")
    if config.output is not None and config.output.exists() and not config.overwrite:
        raise ConfigError(
            f"--output: {config.output} exists: choose another name, or add --overwrite"
        )
    if config.output is not None and not config.output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {config.output.parent}")


def _completed(config: EvalConfig, opened: OpenWeights) -> EvalConfig:
    """Fill in what the weights say of their input."""
    info = opened.info
    known = {
        "model": info.model,
        "input_size": info.input_size[-1],
        "crop_pct": info.crop_pct,
        "crop_mode": info.crop_mode,
        "interpolation": info.interpolation,
        "labels": info.user.get("labels", "single"),
    }
    missing = {name: value for name, value in known.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing)


def _open(config: EvalConfig, folder: Path) -> ImageDataset:
    assert config.input_size is not None, "filled in by _completed"
    transform = images.testing(
        config.input_size, config.crop_mode, config.crop_pct, config.interpolation
    )
    return images.open_split(
        folder,
        config.split,
        eval_transform(transform, dtype=torch.uint8),
        config.labels == "multi",
        config.skip_bad_images,
    )


def _class_map(
    trained: Sequence[str] | None, outputs: int, dataset: ImageDataset
) -> list[int] | None:
    try:
        return class_map(trained, outputs, dataset.classes)
    except ConfigError as error:
        if dataset.multi:
            raise ConfigError(
                f"{error}. Where labels are names, a class that no image has is known from "
                f"{CLASSES_FILE} alone: list all classes there"
            ) from error
        raise


def _outputs(model: nn.Module) -> int:
    outputs = model.num_classes
    assert isinstance(outputs, int), "a TResNet"
    return outputs


def _measure(
    config: EvalConfig,
    model: nn.Module,
    dataset: ImageDataset,
    mapping: list[int] | None,
    processes: Processes,
    console: Console,
) -> Metrics | MultiLabelMetrics:
    loader = create_loader(
        dataset,
        config.batch_size,
        training=False,
        workers=config.workers,
        distributed=(processes.rank, processes.world),
        pin_memory=processes.device.type == "cuda",
    )
    step = InferenceStep(model, config.compute, processes.device, say=console.say)
    try:
        labels = LabelConfig("bce" if config.labels == "multi" else "cross-entropy")
        labels = dataclasses.replace(labels, threshold=config.threshold)
        return evaluate(labels, step, loader, processes, class_map=mapping, console=console)
    finally:
        loader.close()


def _result(
    config: EvalConfig, metrics: Metrics | MultiLabelMetrics, processes: Processes
) -> dict[str, Any]:
    options = dataclasses.asdict(config)
    for name in ("output", "overwrite", "progress"):
        del options[name]
    options |= options.pop("compute")
    return {**dataclasses.asdict(metrics), "processes": processes.world, "options": options}


def _line(config: EvalConfig, metrics: Metrics | MultiLabelMetrics, memory: MemorySnapshot) -> str:
    rate = "" if metrics.images_per_s is None else f", {metrics.images_per_s:.0f} images/s"
    skipped = f", {metrics.skipped} unreadable left out" if metrics.skipped else ""
    return (
        f"{config.weights} on {config.data}/{config.split}: {metrics.summary()} on"
        f" {metrics.images} images{skipped}"
        f"{rate}, memory: {memory.format()}"
    )
