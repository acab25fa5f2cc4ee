"""Check configurations for values that are out of range or contradict each other."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from tresnet.engine.config import AUTO, TrainConfig
from tresnet.env import parse_size
from tresnet.errors import ConfigError, InputError
from tresnet.settings.fields import check
from tresnet.steps.training import check_compiled_accumulation


def validate(config: TrainConfig) -> None:
    """Check types, ranges and contradictions; one `ConfigError` lists all problems."""
    problems = "\n  ".join(_problems(config))
    if problems:
        raise ConfigError(f"the configuration does not fit:\n  {problems}")


def _problems(config: TrainConfig) -> Iterator[str]:
    try:
        check(config)
    except ConfigError as error:
        yield str(error)
        return  # the other checks need values in range
    try:
        check_compiled_accumulation(config.compute.compile, config.optim.accumulate)
        if config.compute.gpu_memory is not None:
            parse_size(config.compute.gpu_memory)
    except ConfigError as error:
        yield str(error)
    except InputError as error:
        yield f"--gpu-memory: {error}"
    yield from _contradictions(config)


def _contradictions(config: TrainConfig) -> Iterator[str]:
    model, data, augment, compute = config.model, config.data, config.augment, config.compute
    if data.data is None:
        yield "--data: say what to train on: a directory with train/ and val/, or digits"
    if model.model is None and model.weights is None:
        yield "--model: say which model to train, or start from --weights"
    if config.recipe == "finetune" and model.weights is None:
        yield "--weights: the recipe finetune needs weights to start from: a tag or a file"
    if config.recipe == "usi" and config.distill.teacher is None:
        yield "--teacher: the recipe usi needs a teacher: a tag, a file or timm:NAME"
    labels, semantic = config.labels, config.labels.loss == "semantic-softmax"
    if semantic and labels.hierarchy is None:
        yield (
            '--hierarchy: --loss semantic-softmax needs a JSON file, {"class": "the one above it"}'
        )
    if semantic and augment.mixes:
        yield "--loss semantic-softmax needs one class an image: expected no --mixup or --cutmix"
    if config.distill.teacher is not None and (semantic or labels.multi):
        yield f"--teacher: expected --loss cross-entropy or one-vs-all, got {labels.loss}"
    sizes = data.progressive_sizes or ()
    if len(sizes) > config.schedule.epochs:
        yield (
            f"--progressive-sizes: expected at most as many sizes as the {config.schedule.epochs}"
            f" epochs, got {sizes}"
        )
    unpredictable = {
        "--teacher": config.distill.teacher is not None,
        "--compile": compute.compile != "none",
        "--cuda-graph on": compute.cuda_graph == "on",
        "--jit": model.jit,
    }
    for name, on in unpredictable.items():
        if on and data.batch_size == AUTO:
            yield (
                f"--batch-size auto: what a model keeps in memory cannot be predicted with {name},"
                " expected a number"
            )
    if model.recompute != "activations" and model.norm != "abn":
        yield f"--recompute {model.recompute}: expected --norm abn, got {model.norm}"
    if augment.mixes and data.batch_size != AUTO and data.batch_size % 2:
        yield (
            "--batch-size: mixup and cutmix pair images, expected an even number, got"
            f" {data.batch_size}"
        )
    if labels.multi and (augment.mixes or augment.label_smoothing):
        yield (
            f"--loss {labels.loss} takes labels as they are: expected no --mixup, --cutmix"
            " or --label-smoothing"
        )
    if (track := config.run.track) is not None and find_spec(track) is None:
        yield f"--track {track}: expected the package {track}, got none: pip install {track}"
    name = config.run.name or ""
    if (
        os.path.basename(name) != name
        or name in (".", "..")
        or len(name.encode(errors="replace")) > 255
    ):
        yield (
            "--name: expected a directory name without a path, of at most 255 bytes, got"
            f" {name!r:.80}"
        )
    for name in ("runs", "name"):  # safetensors opens only UTF-8 paths
        text = getattr(config.run, name) or ""
        if not text.isprintable():
            yield f"--{name}: expected printable UTF-8 text, got {text!a}"
    if augment.mix_off_epochs > config.schedule.epochs:
        yield (
            f"--mix-off-epochs: expected at most the {config.schedule.epochs} epochs of --epochs,"
            f" got {augment.mix_off_epochs}"
        )
    if compute.sync_bn and model.impl == "triton":
        yield "--sync-bn: PyTorch's synchronised norms run without the kernels, got --impl triton"
    if compute.sync_bn and model.norm == "inplace_abn":
        yield "--sync-bn: only --norm abn and batchnorm can be synchronised, got --norm inplace_abn"
