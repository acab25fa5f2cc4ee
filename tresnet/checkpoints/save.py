"""Write weights atomically, in our format or in timm's."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet import environment
from tresnet.checkpoints.describe import SLOPES
from tresnet.checkpoints.fit import bare_model, misfits, model_tensors, with_counts_of
from tresnet.checkpoints.locate import SUFFIXES
from tresnet.checkpoints.metadata import FORMAT_VERSION, check_metadata
from tresnet.checkpoints.read import METADATA_KEY, plain, unusual_kind
from tresnet.errors import CheckpointError, InputError, check_known, listed
from tresnet.layers.hooks import undoing_call
from tresnet.models.heads import DEFAULT_CHANNELS
from tresnet.models.tresnet import TResNet
from tresnet.settings.model import ModelConfig
from tresnet.writing import atomic_write

_log = logging.getLogger(__name__)
FORMATS = ("tresnet", "timm")


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    format: str = "tresnet",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's weights; if this fails, an existing file stays unchanged.

    Args:
        model: A TResNet, or a wrapper of one (compiled, DistributedDataParallel).
        path: A file ending in .safetensors, .pth or .pt. `torch.load(path, weights_only=True)`
            reads .pth and .pt.
        format: 'tresnet' stores the result of `checkpoint_metadata` with the weights. 'timm' stores
            only the state dict, without image size and crop. An ML-Decoder gets the names of timm's
            `add_ml_decoder_head`. A warning names options with which timm must build its model.
        metadata: Values that JSON can hold, such as classes or top1. 'timm' allows no metadata.

    Raises:
        WriteError: the file cannot be written.
        CheckpointError: `format` is 'timm', but timm has no such head, or its class would compute
            other outputs.
        InputError: the format or suffix is unknown; or `model` is not a TResNet with the layers of
            its configuration; or `metadata` contradict the model or do not fit in JSON.
    """
    target = bare_model(model)
    file = Path(path)
    check_known("format", format, FORMATS)
    if file.suffix not in SUFFIXES:
        raise InputError(f"expected a file name ending in {', '.join(SUFFIXES)}, got {file}")
    if format == "timm" and metadata:
        raise InputError(
            f"timm's format has no place for metadata, got {sorted(metadata)}: use format='tresnet'"
        )
    tensors, stored = _tensors_to_save(target), None
    if format == "timm":
        tensors = _for_timm(tensors, target.config, file)
    else:
        stored = checkpoint_metadata(target, metadata)
    with atomic_write(file) as temporary:
        _write(tensors, stored, temporary, file.suffix)


def checkpoint_metadata(
    model: nn.Module, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the metadata of our format for `model`, with `metadata` under the key `user`."""
    target = bare_model(model)
    for key in ("class_names", "label_names"):  # of other programs
        if key in (metadata or {}):
            raise InputError(f"expected names of classes as metadata 'classes', got {key!r}")
    try:
        stored = plain(
            {
                "format_version": FORMAT_VERSION,
                "tresnet_version": environment.__version__,
                "variant": target.config.variant,
                "config": target.config.to_dict(),
                "pretrained_cfg": dict(target.pretrained_cfg),
                "user": dict(metadata or {}),
            }
        )
    except ValueError as error:
        raise InputError(
            f"expected metadata of numbers, strings, lists and dicts, got {error}"
        ) from error
    check_metadata(stored)
    return stored


def _tensors_to_save(model: TResNet) -> dict[str, Tensor]:
    """Return contiguous CPU copies of all tensors, or raise InputError if they would not load."""
    model.state_dict()  # with norm='inplace_abn', this call sets each weight to its gamma
    expected = model_tensors(TResNet(model.config, device="meta"))
    tensors = with_counts_of(expected, model_tensors(model))
    faults = misfits(tensors, expected)
    faults += [f"{name} as {kind}" for name in tensors if (kind := unusual_kind(tensors[name]))]
    if faults:
        call = undoing_call(tensors)
        advice = "change the classifier by reset_classifier" if call is None else f"call {call}"
        raise InputError(
            f"expected tensors as in the model's configuration, got {listed(faults, 6)}: such a "
            f"file could not be read again; {advice}, and save other "
            "changed models by torch.save(model.state_dict())"
        )
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def computed_by_timm(model: TResNet) -> bool:
    """Return whether timm's `create_model`, without our plugin, gives the outputs of `model`."""
    from timm.models import tresnet

    config = model.config
    timms = config.head == "linear" and hasattr(tresnet, config.variant)
    return timms and not _differences_from_timm(config)


def _differences_from_timm(config: ModelConfig) -> list[str]:
    faults = [
        f"{name}={getattr(config, name)!r} (timm's has {value!r})"
        for name, value in {**SLOPES, "block_size": 4}.items()
        if getattr(config, name) != value
    ]
    if config.num_classes and config.head not in ("linear", "ml_decoder"):
        faults.append(f"head={config.head!r} (timm has only linear and ml_decoder)")
    return faults


def _for_timm(tensors: dict[str, Tensor], config: ModelConfig, file: Path) -> dict[str, Tensor]:
    """Rename tensors for timm; the log names options, by timm's names, that `file` cannot state."""
    if faults := _differences_from_timm(config):
        raise CheckpointError(
            f"timm's TResNet would not compute what this model does: {', '.join(faults)}. "
            "Use format='tresnet'"
        )
    usual_width = config.head_channels in (None, DEFAULT_CHANNELS.get(config.head))
    options = {
        "global_pool": None if config.global_pool in ("avg", "fast") else config.global_pool,
        "num_of_groups": config.head_queries,
        "decoder_embedding": None if usual_width else config.head_channels,
    }
    if unstated := [f"{name}={value!r}" for name, value in options.items() if value is not None]:
        text = "%s does not hold %s: give it to the model that loads the file"
        _log.warning(text, file, " and ".join(unstated))
    prefix = "head." if config.head == "ml_decoder" else "head.fc."
    return {name.replace("head.fc.", prefix): value for name, value in tensors.items()}


def _write(
    tensors: dict[str, Tensor], metadata: dict[str, Any] | None, path: Path, suffix: str
) -> None:
    if suffix != ".safetensors":
        ours = {"state_dict": tensors, METADATA_KEY: metadata}
        with path.open("wb") as stream:  # given a path, torch.save would store the temporary name
            torch.save(tensors if metadata is None else ours, stream)
        return
    from safetensors.torch import save_file

    stated = {} if metadata is None else {METADATA_KEY: json.dumps(metadata, sort_keys=True)}
    save_file(tensors, path, metadata={"format": "pt", **stated})
    with path.open("r+b") as file:  # sort the header, so that equal models are saved as equal files
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))
