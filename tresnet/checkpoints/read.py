"""Read files of weights, but run no code from a file; every failure is a `CheckpointError`."""

import argparse
import json
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tresnet.errors import CheckpointError, listed

_log = logging.getLogger(__name__)
METADATA_KEY = "tresnet"
INDEX = ".index.json"  # end of the name of an index of files that together hold a model
FORMAT_VERSION = 2
# Other programs' keys of class names: `read_file` warns of such keys, and saving refuses them.
FOREIGN_NAMES = ("class_names", "label_names")

# Matches the name of a TResNet's tensor; group 1 is the prefix of a wrapper or outer module.
_INSIDE = re.compile(
    r"((?:.+\.)?)body\.(?:_orig_mod\.)?(?:conv1|layer[1-4]\.(?:_orig_mod\.)?\d+)\."
)
_EMA = re.compile(r"(?<![a-z])ema(?![a-z])", re.IGNORECASE)
# A Lightning checkpoint with the key averaging_state has EMA weights in state_dict. The model's own
# weights are in current_model_state, which is therefore left out, and named so in the log.
_WITHOUT_EMA, _MARK_OF_EMA = "current_model_state", "averaging_state"
_NOT_AVERAGED = " (without EMA)"
# Names of what training leaves beside a model: such tensors are named in the log.
_OF_TRAINING = re.compile(
    r"optim|sched|scaler|averag|n_averaged|callback|random|generator|"
    r"(?<![a-z])(ema|rng|loss|criterion|metrics?|loops|hparams|args)(?![a-z])",
    re.IGNORECASE,
)
# Allowed dtypes. Float8 and smaller floats are missing, because PyTorch does not promote them.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Contents(NamedTuple):
    """Contents of a file of weights; the tensors are on the CPU, and named as in the model."""

    tensors: dict[str, Tensor]
    prefix: str = ""  # of the file's names, which `tensors` do not have
    beside: tuple[str, ...] = ()  # names of tensors that are neither the model's nor of training
    metadata: dict[str, Any] | None = None  # what `save_checkpoint` stored, if anything
    classes: tuple[str, ...] | None = None  # names in ASL's and ML-Decoder's `idx_to_class`


def read_file(path: str | os.PathLike[str]) -> Contents:
    """Read a safetensors or torch file, or the index of a model in several files.

    CheckpointError: a file is missing or damaged, holds code, or has no state dict.
    """
    file = Path(path)
    if file.name.endswith(INDEX):
        contents, top_level = _read_parts(file)
    else:
        contents, top_level = _read_one(file)
    found = unwrap(contents, file)  # raises an error unless a torch file holds a dict
    if unread := [key for key in FOREIGN_NAMES if key in top_level]:
        _log.warning(
            "%s: its %s is not read: store names of classes by "
            "tresnet.save_checkpoint(model, FILE, metadata={'classes': NAMES})", file, unread[0],
        )  # fmt: skip
    metadata = top_level.get(METADATA_KEY)
    return found._replace(
        metadata=None if metadata is None else _check_format(metadata, file),
        classes=_named_by_index(top_level.get("idx_to_class"), file),
    )


def _named_by_index(names: Any, path: Path) -> tuple[str, ...] | None:
    """Return the values of ASL's dict from each class index to a name; None without such a dict."""
    if names is None:
        return None
    try:
        by_index = {int(index): str(name) for index, name in names.items()}
        return tuple(by_index[index] for index in range(len(names)))
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "%s: its idx_to_class is not read: expected a dict from 0, 1, ... to names"
        _log.warning(text, path)
        return None


def _read_one(path: Path) -> tuple[Any, Any]:
    """Return a file's contents, and the mapping beside the tensors."""
    if _is_safetensors(path):
        return _read_safetensors(path)
    contents = _read_torch(path)
    return contents, contents


def read_index(path: Path) -> dict[str, set[str]]:
    """Read transformers' index of a model in several files: each file's names of tensors."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: {k for k in index if index[k] == name} for name in sorted(index.values())}
        if not files or any(Path(name).name != name for name in files):
            raise ValueError("no file, or one in another folder")
    except Exception as error:  # damaged JSON raises errors of many types
        raise _damaged(path, "index", error) from error
    return files


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the files of an index; each must hold just the tensors that the index names."""
    tensors: dict[str, Any] = {}
    for name, keys in read_index(path).items():
        part, _ = _read_one(path.parent / name)
        if not isinstance(part, dict) or part.keys() != keys:
            raise CheckpointError(
                f"{path.parent / name} does not hold the tensors that {path.name} names: copy or "
                "download both again"
            )
        tensors |= part
    return tensors, {}


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
            mapped = zipfile.is_zipfile(path)  # torch's older files cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # damaged pickles raise errors of nearly any type
        # The message names the forbidden global; get_unsafe_globals_in_checkpoint reads only zips.
        # Valid weights need no forbidden global of module torch itself: such a name means damage.
        foreign = re.search(r"(?:unsupported|Unsupported global:) GLOBAL (\S+)", str(error))
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


def unwrap(contents: Any, path: Path) -> Contents:
    """Return the weights in a trainer's checkpoint; the names have no prefix.

    The weights may be in any nested dict, and names may have any prefix (`module.`, `_orig_mod.`,
    Lightning's attribute names). As in timm, EMA weights are preferred to the model's weights. The
    log names the prefix, and the other models and the tensors of training that the file holds too.
    CheckpointError: there are no tensors; or an entry is not an ordinary tensor; or of several
    TResNets, none or more than one is an EMA.
    """
    if isinstance(contents, dict) and {"progress", "generators"} <= contents.keys():
        raise CheckpointError(
            f"{path} is the state of a run, which train.py --resume goes on with: take the run's "
            "best.safetensors"
        )
    found = list(_dicts_with_tensors(contents))
    holders = dict(found)
    if len(holders) < len(found):
        raise CheckpointError(f"{path} holds two dicts of tensors under one name")
    if not holders:
        keys = [str(key)[:40] for key in contents][:10] if isinstance(contents, dict) else None
        kind = type(contents).__name__ if keys is None else f"a dict with the keys {keys}"
        raise CheckpointError(
            f"{path} holds no weights: expected a dict of tensors, alone or in other dicts, got "
            f"{kind}"
        )
    place, prefix, beside = _choose(holders, path)
    own = {key: v for key, v in holders[place].items() if str(key).startswith(prefix)}
    wrong = [str(key) for key in own if not isinstance(key, str)]
    wrong += [f"{key} ({kind})" for key, v in own.items() if (kind := unusual_kind(v))]
    if wrong:
        raise CheckpointError(f"{path} holds entries that are not plain tensors: {listed(wrong)}")
    tensors = {key.removeprefix(prefix).replace("_orig_mod.", ""): v for key, v in own.items()}
    if len(tensors) < len(own):
        raise CheckpointError(f"{path} holds two tensors for one name, which differ by _orig_mod.")
    return Contents(tensors, prefix, beside)


def _dicts_with_tensors(contents: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield (path of keys, dict) for each dict that holds tensors, from the outermost inwards.

    Lists are given as dicts of their indices.
    """
    values, seen = [("", contents)], set()  # a dict can contain itself
    for place, value in values:
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        kinds = dict | list | tuple if place else dict
        if not isinstance(value, kinds) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, dict):
            value = dict(enumerate(value))
        if any(isinstance(inner, Tensor) for inner in value.values()):
            yield place, value
        averaged = _MARK_OF_EMA in value
        for key, inner in value.items():
            mark = _NOT_AVERAGED if averaged and key == _WITHOUT_EMA else ""
            values.append((f"{place}{key}{mark}: ", inner))


def _choose(holders: Mapping[str, dict[Any, Any]], path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the key in `holders` of the EMA or the only TResNet, and its names' prefix.

    The third value names the tensors of the file that belong to no TResNet and to no training.
    """
    models = {
        (place, match[1]): f"{place}{match[1]}*"
        for place, tensors in holders.items()
        for key, value in tensors.items()
        if isinstance(value, Tensor) and _NOT_AVERAGED not in place
        if (match := _INSIDE.match(str(key)))
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
    of_training, beside = [], []
    for place, tensors in holders.items():
        prefixes = [prefix for at, prefix in models if at == place]
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                continue
            if any(re.match(rf"{re.escape(p)}(body|head)\.", str(key)) for p in prefixes):
                continue
            if place == chosen[0] and str(key).startswith(chosen[1]):
                continue
            figure = place != chosen[0] and value.numel() <= 1
            trained = figure or _OF_TRAINING.search(f"{place}{key}")
            (of_training if trained else beside).append(f"{place * (place != chosen[0])}{key}")
    if chosen[1] or others or of_training:
        left_out = others + ([by_prefix(of_training, 3)] if of_training else [])
        rest = f"; left out: {listed(left_out, 5)}" if left_out else ""
        _log.warning("%s: the weights are those named %s%s", path, models[chosen], rest)
    return *chosen, tuple(beside)


def by_prefix(names: Iterable[str], limit: int = 4) -> str:
    """List names in at most `limit` groups of one prefix, such as `head.decoder.* (19 tensors)`."""
    parts = {name: re.findall(r".+?(?:\.|: |$)", name) for name in names}
    depth = max(map(len, parts.values()), default=1)
    while depth > 1 and len({tuple(part[:depth]) for part in parts.values()}) > limit:
        depth -= 1
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, part in parts.items():
        groups.setdefault(tuple(part[:depth]), []).append(name)
    texts = [
        f"{''.join(prefix):.80}* ({len(group)} tensors)" if len(group) > 1 else f"{group[0]:.80}"
        for prefix, group in groups.items()
    ]
    return listed(texts, limit)


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
