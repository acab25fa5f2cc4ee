"""Load all weights of a file into a model, or raise an error and change nothing.

Weights are checked key by key. Weights of the stem and gammas of in-place ABN are adapted.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.checkpoints.describe import Checkpoint, describe, summary
from tresnet.checkpoints.locate import Source
from tresnet.checkpoints.read import by_prefix, read_file
from tresnet.checkpoints.rename import INPLACE_ABN_EPS
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.layers.folded_conv import FoldedConv
from tresnet.models.tresnet import STAGES, TResNet

_log = logging.getLogger(__name__)
STEM = "body.conv1.conv.weight"


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str], new_head: bool = False) -> None:
    """Load a file of weights in our, timm's or the public TResNet format into `model`.

    Leaky ReLUs get the negative slopes with which the weights were trained. Tensors are converted
    to the model's dtypes and devices. The stem's weights are adapted to the model's number of image
    channels. Tensors that are not loaded, into a model without a classifier or with `new_head`, are
    named in the log.

    Args:
        model: A TResNet, or a wrapper of one (compiled, DistributedDataParallel, features only).
        path: A file that safetensors or `torch.load(..., weights_only=True)` can read.
        new_head: Leave the head of `model` unchanged.

    Raises:
        CheckpointError: the file is unreadable, holds code or does not fit; `model` is unchanged.
        InputError: `model` is not a TResNet, or `path` is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"expected the path of weights, got {type(path).__name__}")
    target = bare_model(model)
    source = Source(os.fsdecode(path), Path(path))
    load(describe(source, read_file(path), target.config), target, new_head)


def load(checkpoint: Checkpoint, model: TResNet, new_head: bool = False) -> None:
    """Load `checkpoint` into `model`, and set its slopes; errors are those of `load_checkpoint`."""
    install(model, fit(checkpoint, model, new_head or not model.num_classes))
    model.set_slopes(checkpoint.config.stem_slope, checkpoint.config.block_slope)


def install(model: TResNet, fitted: Mapping[str, Tensor]) -> None:
    """Copy the result of `fit` into the model; raise CheckpointError for a model on `meta`."""
    tensors = model_tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise CheckpointError(
            "the model is on the meta device, which holds no values: build the model on another "
            "device, or call model.to_empty(device=...) before loading"
        )
    with torch.no_grad():
        for name, value in fitted.items():
            tensors[name].copy_(value)


def bare_model(model: nn.Module) -> TResNet:
    """Return the TResNet that `model` is or wraps (compiled, EMA, ...); else `InputError`."""
    inner: Any = model
    while not isinstance(inner, TResNet):
        parts = (getattr(inner, name, None) for name in ("_orig_mod", "module", "model"))
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            raise InputError(
                f"expected a TResNet from tresnet.create, got {type(model).__name__}: a scripted "
                "or exported model keeps its weights inside"
            )
    return inner


def fit(checkpoint: Checkpoint, model: TResNet, body_only: bool) -> dict[str, Tensor]:
    """Return the tensors of `checkpoint`, with the names and shapes of `model_tensors(model)`.

    `model` is not changed and may be on the meta device. If `body_only`, tensors outside the body
    are left out, and the log names them. CheckpointError: the weights do not fit the model, or hold
    tensors that are not in the model.
    """
    stored, config = checkpoint.config, model.config
    if stored.block_size != config.block_size and checkpoint.format != "timm":
        raise CheckpointError(
            f"{checkpoint.path} was trained with block_size={stored.block_size}, the model has "
            f"block_size={config.block_size}: build a model with block_size={stored.block_size}"
        )
    wanted = "body." if body_only else ""
    absent = tuple(f"body.{stage}." for stage in STAGES if not hasattr(model.body, stage))
    expected = {n: t for n, t in model_tensors(model).items() if n.startswith(wanted)}
    fits = lambda name: name.startswith(wanted) and not name.startswith(absent)  # noqa: E731
    tensors = {name: checkpoint.tensors[name] for name in filter(fits, checkpoint.tensors)}
    left_out = [name for name in checkpoint.tensors if name not in tensors]
    if STEM in tensors:
        tensors[STEM] = _fit_stem(tensors[STEM], config.block_size**2, config.in_chans)
    tensors = with_counts_of(expected, tensors)
    if faults := misfits(tensors, expected):
        missing, advice = expected.keys() - tensors.keys(), ""
        same_head = {"num_classes": 0} if body_only else {}
        holds, wants = (summary(replace(each, **same_head)) for each in (stored, config))
        if checkpoint.other_layers and not body_only:
            advice = (
                "Beside the body it holds layers that this package has not: load the body alone by "
                "num_classes=0, or with a new head by new_head=True. "
            )
        elif missing and missing == {n for n in expected if re.search(r"\.running_\w+$", n)}:
            advice = (
                "It has no running statistics, as an EMA of parameters alone: take a file that has "
                "them, or add those of the model that was trained, and save the state dict. "
            )
        elif holds != wants:
            advice = (
                f"It holds {holds}, expected {wants}: build such a model, or load all but the head "
                "with new_head=True if only the head differs. "
            )
        raise CheckpointError(f"{checkpoint.path} does not fit. {advice}Keys, {'; '.join(faults)}")
    if left_out:
        _log.warning("%s: left out: %s", checkpoint.path, by_prefix(left_out))
    in_place = [n for n in tensors if n.endswith(".bn.weight") and config.norm == "inplace_abn"]
    _check_values(tensors, expected, checkpoint.path, in_place)
    return tensors | {name: tensors[name].clamp(min=INPLACE_ABN_EPS) for name in in_place}


def model_tensors(model: TResNet) -> dict[str, Tensor]:
    """Return parameters and persistent buffers; a folded model raises InputError.

    Names have no part of a compiler's. `state_dict()` would change weights of in-place ABN, and
    its hooks may return copies.
    """
    if any(isinstance(module, FoldedConv) for module in model.modules()):
        raise InputError(
            "expected a model with norms, got a model folded by tresnet.surgery.fold, which has no "
            "checkpoints: load and save the model before folding"
        )
    return {
        f"{place}.{name}".replace("_orig_mod.", "").lstrip("."): tensor
        for place, module in model.named_modules(prefix=".")
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def with_counts_of(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return `tensors` with the counts of batches that `expected` has; unknown counts are 0.

    The public format has no counts, and neither have norms that timm's `freeze` froze. Others are
    in half precision, as `model.half()` of some programs leaves them. A count has no effect.
    """
    count, mean = ".num_batches_tracked", ".running_mean"
    frozen = {n.removesuffix(mean) + count for n in expected if n.endswith(mean)} - expected.keys()
    result = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    for name in expected:
        if name.endswith(count):
            result[name] = result.get(name, torch.zeros(())).to(torch.int64)
    return result


def _fit_stem(stem: Tensor, pixels: int, target: int) -> Tensor:
    """Adapt the stem's weights to `target` image channels, in at least float32.

    Dimension 1 holds all channels of a block's first pixel, then those of the next, and so on. For
    one channel, weights are summed over channels, so that a grey image gives the output of an RGB
    image with equal channels. Otherwise the channels' weights are repeated cyclically, and rescaled
    so that their sum stays about equal.
    """
    inputs = stem.shape[1] if stem.dim() == 4 else 0
    source = inputs // pixels
    if not source or inputs != pixels * source or source == target:
        return stem
    wide = stem.to(torch.promote_types(stem.dtype, torch.float32)).unflatten(1, (pixels, source))
    if target == 1:
        return wide.sum(dim=2)
    return (wide[:, :, torch.arange(target) % source] * (source / target)).flatten(1, 2)


def misfits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Describe tensors that are missing, unknown, or of another shape or kind (float, integer)."""
    names = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": [name for name in tensors if name not in expected],
    }
    groups: dict[str, list[str]] = {"of another shape": [], "of another kind of number": []}
    for name, wanted in expected.items():
        if (got := tensors.get(name, wanted)).shape != wanted.shape:
            shapes = f"{name} (expected {tuple(wanted.shape)}, got {tuple(got.shape)})"
            groups["of another shape"].append(shapes)
        if got.is_floating_point() != wanted.is_floating_point():
            groups["of another kind of number"].append(f"{name} ({got.dtype})")
    faults = [f"{len(keys)} {what}: {by_prefix(keys)}" for what, keys in names.items() if keys]
    return faults + [f"{len(keys)} {w}: {listed(keys, 1)}" for w, keys in groups.items() if keys]


def _check_values(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    in_place: Sequence[str],
) -> None:
    """Raise CheckpointError for values of a damaged file, or that the model cannot hold."""
    faults: dict[str, list[str]] = {}
    for name, value in tensors.items():
        dtype, fault = expected[name].dtype, ""
        if name.endswith(".running_var") and bool((value < 0).any()):
            fault = "negative variances, so the file is damaged: copy or download it again"
        elif name in in_place and bool((value < 0).any()):
            fault = "negative gammas, which norm='inplace_abn' cannot represent: build the model "
            fault += "with norm='abn'"
        narrow = dtype.is_floating_point and torch.finfo(value.dtype).max > torch.finfo(dtype).max
        if narrow and bool((value.isfinite() & ~value.to(dtype).isfinite()).any()):
            fault = f"values beyond the range of {dtype}: build the model in float32"
        if fault:
            faults.setdefault(fault, []).append(name)
    for fault, names in faults.items():
        raise CheckpointError(f"{path} has {fault}. Keys: {listed(names)}")
