"""Read files of weights, but run no code from a file; every failure is a `CheckpointError`.

A file's tensors may be in any nested dict, behind any prefix. `unwrap` finds the TResNet in it, and
sorts all other tensors: another copy of the model, what training left, or layers nobody knows.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tresnet.errors import CheckpointError, listed

_log = logging.getLogger(__name__)
METADATA_KEY = "tresnet"
INDEX = ".index.json"  # end of the name of an index of files that together hold a model
_INTO = ": "  # stands between the keys of nested dicts in a tensor's name
UNKNOWN = _INTO  # stands before the file's own names of tensors that this package does not know

# Parts of names that torch.compile and other wrappers insert.
_WRAPPERS = re.compile(r"\b_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
# Matches the name of a TResNet's tensor; group 1 is the prefix of a wrapper or outer module.
_INSIDE = re.compile(r"((?:.+(?:\.|: ))?)body\.(?:conv1|layer[1-4]\.\d+)\.(?!.*: )")
_EMA = re.compile(r"(?<![a-z])(?<!no_)(?<!non_)(?<!without_)ema(?![a-z])", re.IGNORECASE)
_STATISTICS = re.compile(r".*\.(running_mean|running_var|num_batches_tracked|filt)")
# Lightning's WeightAveraging keeps the EMA in state_dict, and under this key the model's weights.
_WITHOUT_EMA = "current_model_state"
# Keys of dicts, and first parts of names, of what training leaves beside a model.
_OF_TRAINING = re.compile(
    rf"{_WITHOUT_EMA}|averaging_state|n_averaged|callbacks?|loops|args|hparams|hyper_?parameters|"
    r"generators?|random(_states?)?|(\w+_)?(ema|rng|loss|losses|criterion)(_\w+)?|"
    r"(\w+_)?(opt|optim\w*|(lr)?sched\w*|scaler|metrics?)(_states?)?(_dict)?",
    re.IGNORECASE,
)
# Allowed dtypes. Float8 and smaller floats are missing, because PyTorch does not promote them.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Contents(NamedTuple):
    """Contents of a file of weights; the tensors are on the CPU."""

    tensors: dict[str, Tensor]  # named as in the model; others have `UNKNOWN` before their names
    prefix: str  # of the model's names in the file, with the keys of the dicts around them
    values: dict[str, Any]  # all values beside the tensors and all containers, by their names


def read_file(path: str | os.PathLike[str]) -> Contents:
    """Read a safetensors or torch file, or the index of a model in several files.

    CheckpointError: a file is missing or damaged, holds code, or has no state dict.
    """
    file = Path(path)
    if file.name.endswith(INDEX):
        return unwrap(_read_parts(file), file)
    if not _is_safetensors(file):
        return unwrap(_read_torch(file), file)
    tensors, header = _read_safetensors(file)
    return unwrap(tensors, file, header)


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


def _read_parts(path: Path) -> dict[str, Any]:
    """Read the files of an index; each must hold just the tensors that the index names."""
    tensors: dict[str, Any] = {}
    for name, keys in read_index(path).items():
        file = path.parent / name
        part = _read_safetensors(file)[0] if _is_safetensors(file) else _read_torch(file)
        if not isinstance(part, dict) or part.keys() != keys:
            raise CheckpointError(
                f"{file} does not hold the tensors that {path.name} names: copy or download both "
                "again"
            )
        tensors |= part
    return tensors


def _is_safetensors(path: Path) -> bool:
    try:
        if not path.is_file():  # reading a pipe would block
            raise CheckpointError(f"no file of weights at {path}: check the path")
        with path.open("rb") as stream:
            return path.suffix == ".safetensors" or stream.read(9)[8:] == b"{"  # of the header
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
    for key in header.keys() - {METADATA_KEY}:
        with contextlib.suppress(ValueError, RecursionError):  # other programs' texts
            header[key] = json.loads(header[key])
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
        if re.search(r"TorchScript|locating file data\.pkl", str(error)):
            raise CheckpointError(
                f"{path} is no file of torch.save: of a scripted or exported program, save the "
                "state dict"
            ) from error
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


def unwrap(contents: Any, path: Path, header: Mapping[str, Any] | None = None) -> Contents:
    """Find the TResNet in a trainer's checkpoint; its names lose their prefix.

    As in timm, an EMA is preferred to the model; one of parameters alone gets the statistics of the
    model beside it. The log names the prefix, the other models and the tensors of training. Other
    values come from `header`, or from beside the weights. CheckpointError: there are no tensors; or
    an entry is not an ordinary tensor; or of several TResNets, none or more than one is an EMA.
    """
    outer = contents if isinstance(contents, dict) else {}
    if {"progress", "generators"} <= outer.keys():
        raise CheckpointError(
            f"{path} is the state of a run, which train.py --resume goes on with: take the run's "
            "best.safetensors"
        )
    values = _by_name(outer, path)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = f"a dict with the keys {[str(key)[:40] for key in outer][:10]}"
        kind = keys if outer or contents == {} else type(contents).__name__
        raise CheckpointError(
            f"{path} holds no weights: expected a dict of tensors, alone or in other dicts, got "
            f"{kind}"
        )
    prefix, own = _choose(values, tensors, path)
    if wrong := [f"{name} ({kind})" for name, v in own.items() if (kind := unusual_kind(v))]:
        raise CheckpointError(f"{path} holds entries that are not plain tensors: {listed(wrong)}")
    return Contents(own, prefix, values if header is None else _by_name(header, path))


def _by_name(contents: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return the values of nested dicts, lists and namespaces by names such as `ema: body.conv1.x`.

    Containers are values too. Names have no parts that wrappers insert.
    """
    found: list[tuple[str, Any]] = [("", contents)]
    values, seen = {}, set()  # a dict can contain itself
    for name, value in found:
        if name in values:
            raise CheckpointError(f"{path} holds two values under one name, {name}")
        values[name] = value = vars(value) if isinstance(value, argparse.Namespace) else value
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            into = _INTO if name else ""
            for key, inner in pairs:  # the name "" is that of the whole
                found.append((f"{name}{into}{_WRAPPERS.sub('', str(key)) or repr('')}", inner))
    return values


def _choose(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> tuple[str, dict[str, Any]]:
    """Return the prefix of the EMA, or of the only TResNet, and what is under it without prefix.

    Tensors that belong to no TResNet and to no training get `UNKNOWN` before their names.
    """
    matches = (_INSIDE.match(name) for name in tensors if not name.startswith(_WITHOUT_EMA))
    prefixes = list(dict.fromkeys(match[1] for match in matches if match))
    if not prefixes:
        raise CheckpointError(
            f"{path} is not a TResNet: expected names such as body.conv1.conv.weight (timm's and "
            f"ours) or body.conv1.0.weight (the public TResNet format), got {listed(tensors, 3)}"
        )
    emas = list(filter(_EMA.search, prefixes))
    if len(prefixes) > 1 and len(emas) != 1:
        raise CheckpointError(
            f"{path} holds {len(prefixes)} TResNets, under the names "
            f"{listed(f'{prefix}*' for prefix in prefixes)}: save the state dict of one of them to "
            "a file of its own"
        )
    chosen = (emas or prefixes)[0]
    others = [prefix for prefix in prefixes if prefix != chosen]
    own = _under(chosen, values)
    text = f"the weights are those named {chosen}*"
    peers = [prefix for prefix in others if not re.search("(?i)teacher|pretrained", prefix)]
    if len(peers) == 1 and not any(name.endswith(".running_mean") for name in own):
        raw = _under(peers[0], tensors)
        if statistics := {name: raw[name] for name in raw if _STATISTICS.fullmatch(name)}:
            own |= statistics
            text += f", and the running statistics, which these lack, those named {peers[0]}*"
    place = chosen.split(_INTO)[:-1]
    copies = tuple(f"{prefix}{part}." for prefix in prefixes for part in ("body", "head"))
    of_training = []
    for name, value in tensors.items():
        *at, key = name.split(_INTO)
        if name.startswith(copies) or (at == place and name.startswith(chosen)):
            continue
        words = [*filter(lambda word: word not in place, at), key.partition(".")[0]]
        counter = value.numel() <= 1 and (at != place or not value.is_floating_point())
        shown = UNKNOWN + (key if at == place else name)
        if counter or any(map(_OF_TRAINING.fullmatch, words)):
            of_training.append(shown)
        else:
            own[shown] = value
    left_out = [f"{prefix}*" for prefix in others]
    left_out += [by_prefix(of_training, 3)] if of_training else []
    if chosen.rpartition(_INTO)[2] or left_out:
        rest = f"; left out: {listed(left_out, 5)}" if left_out else ""
        _log.warning("%s: %s%s", path, text, rest)
    return chosen, own


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names are in the dict of a model with this prefix, without it."""
    own = {name.removeprefix(prefix): values[name] for name in values if name.startswith(prefix)}
    return {
        name: value
        for name, value in own.items()
        if _INTO not in name and not isinstance(value, dict | list | tuple)
    }


def by_prefix(names: Iterable[str], limit: int = 4) -> str:
    """List names in at most `limit` groups of one prefix, such as `head.decoder.* (19 tensors)`.

    What is before `UNKNOWN` is left out.
    """
    names = [name.split(UNKNOWN, 1)[-1] for name in names]
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


def plain(value: Any) -> Any:
    """Convert a value to JSON and back; raise ValueError if JSON cannot hold the value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no plain values ({type(error).__name__}: {error})") from error
