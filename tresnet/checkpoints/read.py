"""Opens files of weights without ever running code from them.

Two kinds of file are read: safetensors, which cannot hold code, and torch files through
`weights_only=True`, which refuses it. Every failure is a `CheckpointError` that names the file.
"""

import argparse
import io
import json
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tresnet.errors import CheckpointError

METADATA_KEY = "tresnet"
FORMAT_VERSION = 1

# Where training scripts keep the weights, in the order of preference (the average first, as timm).
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
# What DistributedDataParallel, torch.compile and a wrapping module put before every key.
_PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class WeightsFile:
    """The contents of a file of weights.

    Attributes:
        path: the file.
        tensors: the weights by name, unwrapped, without prefixes of wrapping modules; on the CPU.
        metadata: what `save_checkpoint` stored beside them; None in files of others.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] | None = None


def read_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """Read a .safetensors or torch file; its contents, not its name, decide which it is.

    Raises:
        CheckpointError: the file is missing, damaged, holds code, or holds no state dict.
    """
    file = Path(path)
    _check_exists(file)
    if _is_safetensors(file):
        tensors, metadata = _read_safetensors(file)
    else:
        contents = _read_torch(file)
        metadata = contents.get(METADATA_KEY) if isinstance(contents, dict) else None
        tensors = contents
    return WeightsFile(file, unwrap(tensors, file), _check_metadata(metadata, file))


def _check_exists(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError(
            f"expected a file of weights, got the directory {path}: name a file inside it"
        )
    if not path.exists():
        raise CheckpointError(f"no file of weights at {path}: check the path")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty: copy or download it again")


def _is_safetensors(path: Path) -> bool:
    """Whether the file starts as safetensors do: the header's length, then a JSON object."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as stream:
        start = stream.read(9)
    length = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and length < path.stat().st_size


def _read_safetensors(path: Path) -> tuple[dict[str, Any], Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, "safetensors", error) from error
    if METADATA_KEY not in header:
        return tensors, None
    try:
        return tensors, json.loads(header[METADATA_KEY])
    except ValueError as error:
        raise _damaged(path, "safetensors", error) from error


def _read_torch(path: Path) -> Any:
    try:
        # timm's training checkpoints keep their options in a Namespace, which holds data only
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old layouts and pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise nearly anything
        foreign = sorted({name for name in _names_in_pickles(path) if not _is_plain(name)})
        if not foreign:
            raise _damaged(path, "torch", error) from error
        raise CheckpointError(
            f"{path} holds code or objects besides tensors ({', '.join(foreign[:3])}), which could "
            "run anything when read, so it was not opened: ask its author for a state dict, or, if "
            "you trust the file, open it yourself and save its state dict with safetensors"
        ) from error


def _is_plain(name: str) -> bool:
    """Whether a name in a pickle is one that tensors and their containers need."""
    plain = ("collections.OrderedDict", "argparse.Namespace")
    return name in plain or re.fullmatch(r"torch\.(_utils\.\w+|\w+Storage|\w+)", name) is not None


def _names_in_pickles(path: Path) -> Iterator[str]:
    """Yield the functions and classes that a file's pickles refer to, without running them."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            stream: IO[bytes] = io.BytesIO(archive.read(member))
    except (zipfile.BadZipFile, StopIteration, OSError):
        stream = path.open("rb")
    strings: list[str] = []
    with stream:
        while True:  # older files hold several pickles in a row, then bytes
            try:
                for opcode, argument, _ in pickletools.genops(stream):
                    if opcode.name in ("GLOBAL", "INST"):
                        yield str(argument).replace(" ", ".")
                    elif opcode.name == "STACK_GLOBAL":
                        yield ".".join(strings[-2:])
                    elif isinstance(argument, str):
                        strings.append(argument)
            except Exception:  # the end, or no pickle
                return


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    text = str(error)
    # torch's first lines advise to allow code, which is not what a damaged file needs
    detail = re.search(r"WeightsUnpickler error: (.+)", text)
    if isinstance(error, pickle.UnpicklingError):
        text = detail[1] if detail else ""
    reason = text.strip().split("\n")[0][:200] or type(error).__name__
    return CheckpointError(
        f"{path} is not a readable {kind} file ({reason}): it is damaged, cut short or of another "
        "kind; copy or download it again"
    )


def unwrap(contents: Any, path: Path) -> dict[str, Tensor]:
    """Return the weights out of what a file holds: under the wrapping keys, prefixes removed.

    Raises:
        CheckpointError: there are none; the message names `path`.
    """
    while isinstance(contents, dict):
        inner = [contents[key] for key in _WRAPPERS if isinstance(contents.get(key), dict)]
        if not inner:
            break
        contents = inner[0]
    if not isinstance(contents, dict) or not any(isinstance(v, Tensor) for v in contents.values()):
        raise CheckpointError(
            f"{path} holds no weights: expected a dict of tensors, alone or under "
            f"{', '.join(map(repr, _WRAPPERS))}, got {_kind(contents)}"
        )
    return _strip_prefixes(contents)


def _kind(contents: Any) -> str:
    if isinstance(contents, dict):
        return f"a dict with the keys {list(contents)[:10]}"
    return type(contents).__name__


def _strip_prefixes(tensors: dict[str, Any]) -> dict[str, Tensor]:
    found = True
    while found and tensors:
        found = False
        for prefix in _PREFIXES:
            if all(str(key).startswith(prefix) for key in tensors):
                tensors = {key[len(prefix) :]: value for key, value in tensors.items()}
                found = True
    return tensors


def _check_metadata(metadata: Any, path: Path) -> dict[str, Any] | None:
    if metadata is None:
        return None
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written in format {version}, this version of tresnet reads up to "
            f"{FORMAT_VERSION}: upgrade tresnet"
        )
    return metadata
