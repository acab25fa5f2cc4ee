"""Writes weights, and any file, whole or not at all."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet import env
from tresnet.checkpoints.load import bare_model, model_tensors
from tresnet.checkpoints.read import FORMAT_VERSION, METADATA_KEY
from tresnet.errors import CheckpointError, InputError
from tresnet.models.config import BLOCK_SLOPE, STEM_SLOPE
from tresnet.models.tresnet import STAGES, TResNet

FORMATS = ("tresnet", "timm")
SUFFIXES = (".safetensors", ".pth", ".pt")
TIMM_BLOCK_SIZE = 4


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which becomes `path` when the block succeeds.

    Whatever fails in the block (a full disk, an exception, Ctrl-C) removes the temporary file and
    leaves the old `path` as it was. On success the data reach the disk before the name does, so a
    crash leaves the old file or the new one. The caller creates the temporary file itself, with
    `open` or a library; its permissions follow the umask, whatever the library gave it (safetensors
    keeps its files to their owner). A symbolic link is written through.

    Args:
        path: the file to write; its directory must exist.

    Yields:
        A path in the same directory that does not exist yet.

    Raises:
        OSError: the directory is missing, `path` is a directory, or writing failed.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "expected a file to write, got a directory", str(path)
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the directory does not exist", str(target.parent))
    # cut to stay within the 255 bytes that file systems allow for a name
    temporary = target.parent / f".{target.name[:48]}.{secrets.token_hex(8)}.tmp"
    try:
        mode = _usual_mode(temporary)
        yield temporary
        temporary.chmod(mode)
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot fsync a directory
        _fsync(target.parent)


def _usual_mode(path: Path) -> int:
    """Return the permissions that `open` gives a new file at `path`; the umask cannot be read."""
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    format: str = "tresnet",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's weights; the old file stays if anything fails.

    Args:
        model: a TResNet, or a wrapper of one (compiled, DistributedDataParallel).
        path: .safetensors, or .pth or .pt (read with `weights_only=True`).
        format: 'tresnet' stores what `checkpoint_metadata` returns beside the weights; 'timm' is
            the plain state dict that timm's class loads.
        metadata: plain values to keep with the weights, such as classes or top1.

    Raises:
        CheckpointError: writing failed, or timm's class would compute something else.
        InputError: an unknown format or suffix, metadata that JSON cannot hold, or no TResNet.
    """
    target = bare_model(model)
    file = Path(path)
    _check_arguments(file, format, metadata)
    tensors = _plain_tensors(target)
    stored = None
    if format == "timm":
        _check_timm(target)
    else:
        stored = checkpoint_metadata(target, metadata)
    try:
        with atomic_write(file) as temporary:
            _write(tensors, stored, temporary, file.suffix)
    except Exception as error:  # safetensors, torch and the system each have their own
        raise CheckpointError(
            f"could not write {file}: {error}; what was there before is intact. Free some space, "
            "or choose another place"
        ) from error


def checkpoint_metadata(
    model: nn.Module, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what is stored beside the weights, as plain values.

    Keys: format_version, tresnet_version, variant, config (all of the model's configuration, the
    slopes included), pretrained_cfg and user (the caller's own).

    Raises:
        InputError: JSON cannot hold a value of `metadata`.
    """
    target = bare_model(model)
    return {
        "format_version": FORMAT_VERSION,
        "tresnet_version": env.package_version(),
        "variant": target.config.variant,
        "config": target.config.to_dict(),
        "pretrained_cfg": _plain_values(target.pretrained_cfg, "pretrained_cfg"),
        "user": _plain_values(metadata or {}, "metadata"),
    }


def _plain_values(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    plain = {}
    for key, value in values.items():
        try:
            plain[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"expected {what} of numbers, strings, lists and dicts, got {key}={value!r} "
                f"({error})"
            ) from error
    return plain


def _check_arguments(path: Path, format: str, metadata: Mapping[str, Any] | None) -> None:
    if format not in FORMATS:
        raise InputError(f"expected format out of {', '.join(FORMATS)}, got {format!r}")
    if path.suffix not in SUFFIXES:
        raise InputError(f"expected a file name ending in {', '.join(SUFFIXES)}, got {path}")
    if format == "timm" and metadata:
        raise InputError(
            f"timm's format has no place for metadata, got {sorted(metadata)}: use format='tresnet'"
        )


def _plain_tensors(model: TResNet) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU: no shared or larger storage is dragged along."""
    absent = [stage for stage in STAGES if not hasattr(model.body, stage)]
    if absent:
        raise InputError(f"expected a whole model to save, got one cut off before {absent[0]}")
    model.state_dict()  # lets norm='inplace_abn' turn its weights into plain gammas
    tensors = model_tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError("the model is on the meta device, which holds no values to save")
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _check_timm(model: TResNet) -> None:
    """Refuse what timm's class would compute otherwise: it has one head, slope pair and stem."""
    config = model.config
    wanted = {
        "stem_slope": STEM_SLOPE,
        "block_slope": BLOCK_SLOPE,
        "block_size": TIMM_BLOCK_SIZE,
        "head": "linear",
    }
    faults = [
        f"{name}={getattr(config, name)!r} (timm's has {value!r})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if faults:
        raise CheckpointError(
            f"timm's TResNet would not compute what this model does: {', '.join(faults)}. "
            "Use format='tresnet'"
        )


def _write(
    tensors: dict[str, Tensor], metadata: dict[str, Any] | None, path: Path, suffix: str
) -> None:
    if suffix == ".safetensors":
        from safetensors.torch import save_file

        header = {"format": "pt"}
        if metadata is not None:
            header[METADATA_KEY] = json.dumps(metadata)
        save_file(tensors, path, metadata=header)
        return
    with path.open("wb") as stream:  # a stream, so that no temporary name enters the file
        torch.save(
            tensors if metadata is None else {"state_dict": tensors, METADATA_KEY: metadata}, stream
        )
