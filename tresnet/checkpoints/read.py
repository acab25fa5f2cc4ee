"""Opens files of weights without ever running code from them.

Two kinds of file are read: safetensors, which cannot hold code, and torch files through
`weights_only=True`, which refuses it. Every failure is a `CheckpointError` that names the file.
"""

import argparse
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import CheckpointError

METADATA_KEY, CHECKSUM_KEY = "tresnet", "tresnet_sha256"
# 2 has a checksum, which 1 had not.
FORMAT_VERSION = 2

# Where training scripts keep the weights, in the order of preference (the average first, as timm).
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
# What DistributedDataParallel, torch.compile and a wrapping module put before every key.
_PREFIXES = ("module.", "_orig_mod.", "model.")
# What every PyTorch converts into every other of its kind; float8 and smaller, it does not.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


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
    if _is_safetensors(file):
        contents, metadata, stated = _read_safetensors(file)
    else:
        contents = _read_torch(file)
        extras = contents if isinstance(contents, dict) else {}
        metadata, stated = extras.get(METADATA_KEY), extras.get(CHECKSUM_KEY)
    tensors = unwrap(contents, file)
    metadata = _check_metadata(metadata, file)
    _check_sum(tensors, metadata, stated, file)
    return WeightsFile(file, tensors, metadata)


def _is_safetensors(path: Path) -> bool:
    """Whether the file starts as safetensors do: the header's length, then a JSON object."""
    try:
        if path.is_dir():
            raise CheckpointError(
                f"expected a file of weights, got the directory {path}: name a file inside it"
            )
        if not path.exists():
            raise CheckpointError(f"no file of weights at {path}: check the path")
        if not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"expected a file of weights, got a pipe or device: {path}")
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if size == 0:
        raise CheckpointError(f"{path} is empty: copy or download it again")
    length = int.from_bytes(start[:8], "little")
    return path.suffix == ".safetensors" or (start[8:] == b"{" and length < size)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], Any, Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = json.loads(header[METADATA_KEY]) if METADATA_KEY in header else None
    except Exception as error:  # nested JSON recurses, 4-bit types are no attribute of torch, ...
        raise _damaged(path, "safetensors", error) from error
    return tensors, metadata, header.get(CHECKSUM_KEY)


def _read_torch(path: Path) -> Any:
    try:
        # timm's training checkpoints keep their options in a Namespace, which holds data only
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old layouts and pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise nearly anything
        # get_unsafe_globals_in_checkpoint reads zip files alone; this message names the first of
        # any file that has some.
        foreign = re.search(r"Unsupported global: GLOBAL (\S+) was not", str(error))
        if foreign is None or re.fullmatch(r"torch\.\w+", foreign[1]):  # a damaged name of torch's
            raise _damaged(path, "torch", error) from error
        raise CheckpointError(
            f"{path} holds code or objects besides tensors ({foreign[1]}), which could run "
            "anything when read, so it was not opened: ask its author for a state dict, or, if "
            "you trust the file, open it yourself and save its state dict with safetensors"
        ) from error


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    # torch's first lines advise to allow code, which is not what a damaged file needs
    detail = re.search(r"WeightsUnpickler error: \s*(.+)", str(error))
    text = detail[1] if detail else str(error).strip()
    reason = type(error).__name__ if not text or "weights_only" in text else text.split("\n")[0]
    return CheckpointError(
        f"{path} is not a readable {kind} file ({reason[:200]}): it is damaged, cut short or of "
        "another kind; copy or download it again"
    )


def unwrap(contents: Any, path: Path) -> dict[str, Tensor]:
    """Return the weights out of what a file holds: under the wrapping keys, prefixes removed.

    Raises:
        CheckpointError: there are none, or other things among them; the message names `path`.
    """
    if isinstance(contents, dict) and {"progress", "generators"} <= contents.keys():
        raise CheckpointError(
            f"{path} is the state of a run, which train.py --resume goes on with: take the run's "
            "best.safetensors"
        )
    for _ in range(8):  # a dict can contain itself
        inner = (
            [contents[key] for key in _WRAPPERS if isinstance(contents.get(key), dict)]
            if isinstance(contents, dict)
            else []
        )
        if not inner:
            break
        contents = inner[0]
    if not isinstance(contents, dict) or not any(isinstance(v, Tensor) for v in contents.values()):
        raise CheckpointError(
            f"{path} holds no weights: expected a dict of tensors, alone or under "
            f"{', '.join(map(repr, _WRAPPERS))}, got {_kind(contents)}"
        )
    wrong = [f"{key} ({_fault(key, value)})" for key, value in contents.items()]
    wrong = [text for text in wrong if not text.endswith(" ()")]
    if wrong:
        raise CheckpointError(f"{path} holds entries that are not plain tensors: {listed(wrong)}")
    return _strip_prefixes(contents)


def _fault(key: object, value: object) -> str:
    """What makes an entry something else than a name and a plain tensor; '' if it is one."""
    if not isinstance(key, str):
        return "a name that is not text"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_quantized:
        return "sparse or quantised"
    if value.is_meta:
        return "on the meta device, without values"
    if value.dtype not in DTYPES:
        return str(value.dtype)
    # An expanded tensor, of a few bytes, would have a model of any size made for it.
    small = value.untyped_storage().nbytes() < value.numel() * value.element_size()
    return "larger than its storage" if small else ""


def _kind(contents: Any) -> str:
    if isinstance(contents, dict):
        return f"a dict with the keys {[str(key)[:40] for key in list(contents)[:10]]}"
    return type(contents).__name__


def _strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = True
    while found and tensors:
        found = False
        for prefix in _PREFIXES:
            if all(key.startswith(prefix) for key in tensors):
                tensors = {key[len(prefix) :]: value for key, value in tensors.items()}
                found = True
    return tensors


def _check_metadata(metadata: Any, path: Path) -> dict[str, Any] | None:
    if metadata is None:
        return None
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written in format {version!r}, this version of tresnet reads up to "
            f"{FORMAT_VERSION}: upgrade tresnet"
        )
    try:
        return json.loads(json.dumps(metadata, allow_nan=False))  # a torch file may hold anything
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has metadata that are not plain values ({type(error).__name__}): save it again"
        ) from error


def _check_sum(
    tensors: Mapping[str, Tensor], metadata: dict[str, Any] | None, stated: Any, path: Path
) -> None:
    """Compare with the checksum stated in the file. Files of others, and older ones, have none."""
    needed = metadata is not None and metadata["format_version"] >= 2
    if (needed or stated is not None) and stated != checksum(tensors, metadata):
        raise CheckpointError(
            f"{path} is damaged: its contents do not have the checksum it states; copy or "
            "download it again"
        )


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of tensors and of the metadata."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(errors="replace"))
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Return the first `limit` names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
