"""Read files of weights, but run no code from a file; every failure is a `CheckpointError`."""

import argparse
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import CheckpointError, listed

_log = logging.getLogger(__name__)
METADATA_KEY = "tresnet"
FORMAT_VERSION = 2
# Other programs' keys of class names: `read_file` warns of such keys, and saving refuses them.
FOREIGN_NAMES = ("class_names", "label_names")

# Matches the name of a TResNet's tensor; group 1 is the prefix of a wrapper or outer module.
_INSIDE = re.compile(
    r"((?:.+\.)?)body\.(?:_orig_mod\.)?(?:conv1|layer[1-4]\.(?:_orig_mod\.)?\d+)\."
)
_EMA = re.compile(r"(?<![a-z])ema(?![a-z])", re.IGNORECASE)
# A Lightning checkpoint with the key averaging_state has EMA weights in state_dict. The model's own
# weights are in current_model_state, which is therefore not read.
_WITHOUT_EMA, _MARK_OF_EMA = "current_model_state", "averaging_state"
# Allowed dtypes. Float8 and smaller floats are missing, because PyTorch does not promote them.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and metadata of a safetensors or torch file.

    The tensors are on the CPU, and the keys are their names in the model. The metadata are those
    that `save_checkpoint` stored, or {} if the file has none. CheckpointError: the file is missing
    or damaged, holds code, or has no state dict.
    """
    file = Path(path)
    if _is_safetensors(file):
        contents, top_level = _read_safetensors(file)
    else:
        contents = top_level = _read_torch(file)
    tensors = unwrap(contents, file)  # raises an error unless a torch file holds a dict
    if unread := [key for key in FOREIGN_NAMES if key in top_level]:
        _log.warning(
            "%s: its %s is not read: store names of classes by "
            "tresnet.save_checkpoint(model, FILE, metadata={'classes': NAMES})", file, unread[0],
        )  # fmt: skip
    metadata = top_level.get(METADATA_KEY)
    return tensors, {} if metadata is None else _check_format(metadata, file)


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is named .safetensors, or has the `{` of a safetensors header."""
    try:
        if not path.is_file():  # reading a pipe would block
            raise CheckpointError(f"no file of weights at {path}: check the path")
        with path.open("rb") as stream:
            return path.suffix == ".safetensors" or stream.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if METADATA_KEY in header:
            header[METADATA_KEY] = json.loads(header[METADATA_KEY])
    except Exception as error:  # damaged files and 4-bit dtypes raise errors of many types
        raise _damaged(path, "safetensors", error) from error
    return tensors, header


def _read_torch(path: Path) -> Any:
    if path.suffix == ".onnx":
        raise CheckpointError(
            f"expected weights, got the exported file {path}: only tresnet predict reads it, with "
            "--runtime onnx"
        )
    try:
        # allow Namespace, which runs no code: timm's training checkpoints store options in it
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about old layouts and pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise errors of nearly any type
        # The message names the forbidden global; get_unsafe_globals_in_checkpoint reads only zips.
        # Valid weights need no forbidden global of module torch itself: such a name means damage.
        foreign = re.search(r"Unsupported global: GLOBAL (\S+) was not", str(error))
        if foreign is None or re.fullmatch(r"torch\.\w+", foreign[1]):
            raise _damaged(path, "torch", error) from error
        raise CheckpointError(
            f"{path} holds code or objects besides tensors ({foreign[1]}), which could run "
            "anything when read, so it was not opened: ask its author for a state dict, or, if "
            "you trust the file, open it yourself and save its state dict with safetensors"
        ) from error


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    # torch's message is left out, because it advises users to allow code
    return CheckpointError(
        f"{path} is not a readable {kind} file ({type(error).__name__}): it is damaged, cut short "
        "or of another kind; copy or download it again"
    )


def unwrap(contents: Any, path: Path) -> dict[str, Tensor]:
    """Return a dict of the weights in a trainer's checkpoint; the names have no prefix.

    The weights may be in any nested dict, and names may have any prefix (`module.`, `_orig_mod.`,
    Lightning's attribute names). As in timm, EMA weights are preferred to the model's weights. The
    log names the prefix and the first ignored keys. CheckpointError: there are no tensors; or an
    entry is not an ordinary tensor; or of several TResNets, none or more than one is an EMA.
    """
    if isinstance(contents, dict) and {"progress", "generators"} <= contents.keys():
        raise CheckpointError(
            f"{path} is the state of a run, which train.py --resume goes on with: take the run's "
            "best.safetensors"
        )
    holders = dict(_dicts_with_tensors(contents))
    if not holders:
        keys = [str(key)[:40] for key in contents][:10] if isinstance(contents, dict) else None
        kind = type(contents).__name__ if keys is None else f"a dict with the keys {keys}"
        raise CheckpointError(
            f"{path} holds no weights: expected a dict of tensors, alone or in other dicts, got "
            f"{kind}"
        )
    place, prefix = _choose(holders, path)
    own = {key: v for key, v in holders[place].items() if str(key).startswith(prefix)}
    wrong = [str(key) for key in own if not isinstance(key, str)]
    wrong += [f"{key} ({kind})" for key, v in own.items() if (kind := unusual_kind(v))]
    if wrong:
        raise CheckpointError(f"{path} holds entries that are not plain tensors: {listed(wrong)}")
    return {key.removeprefix(prefix).replace("_orig_mod.", ""): v for key, v in own.items()}


def _dicts_with_tensors(contents: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield (path of keys, dict) for each dict that holds tensors, from the outermost inwards."""
    values, seen = [("", contents)], set()  # a dict can contain itself
    for place, value in values:
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        if any(isinstance(inner, Tensor) for inner in value.values()):
            yield place, value
        left_out = _WITHOUT_EMA if _MARK_OF_EMA in value else None
        values += [(f"{place}{key}: ", inner) for key, inner in value.items() if key != left_out]


def _choose(holders: Mapping[str, dict[Any, Any]], path: Path) -> tuple[str, str]:
    """Return the key in `holders` of the EMA or the only TResNet, and its names' prefix."""
    models = {
        (place, match[1]): f"{place}{match[1]}*"
        for place, tensors in holders.items()
        for key, value in tensors.items()
        if isinstance(value, Tensor) and (match := _INSIDE.match(str(key)))
    }
    if not models:
        raise CheckpointError(
            f"{path} is not a TResNet: expected names such as body.conv1.conv.weight (timm's and "
            "ours) or body.conv1.0.weight (the public TResNet format), got "
            + listed(next(iter(holders.values())), 3)
        )
    emas = [model for model, name in models.items() if _EMA.search(name)]
    if len(models) > 1 and len(emas) != 1:
        raise CheckpointError(
            f"{path} holds {len(models)} TResNets, under the names {listed(models.values())}: save "
            "the state dict of one of them to a file of its own"
        )
    chosen = emas[0] if emas else next(iter(models))
    others = [name for model, name in models.items() if model != chosen]
    place, prefix = chosen
    others += [str(key) for key in holders[place] if not str(key).startswith(prefix)]
    if prefix or others:
        rest = f"; left out: {listed(others, 5)}" if others else ""
        _log.warning("%s: the weights are those named %s%s", path, models[chosen], rest)
    return chosen


def unusual_kind(value: object) -> str:
    """Describe a value that a file of weights must not hold; return '' for an ordinary tensor."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return type(value).__name__
    if value.layout == torch.strided and value.dtype in _DTYPES and not value.is_meta:
        return ""
    return f"{value.layout} of {value.dtype} on {value.device}"


def _check_format(metadata: Any, path: Path) -> dict[str, Any]:
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    if version not in (1, FORMAT_VERSION):
        raise CheckpointError(
            f"{path} was written in format {version!r}, this version of tresnet reads up to "
            f"{FORMAT_VERSION}: upgrade tresnet"
        )
    try:
        return plain(metadata)  # a torch file may hold any objects
    except ValueError as error:
        raise CheckpointError(f"{path} has metadata that are {error}: save it again") from error


def plain(value: Any) -> Any:
    """Convert a value to JSON and back; raise ValueError if JSON cannot hold the value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no plain values ({type(error).__name__}: {error})") from error
