"""The one function that makes a model: by name, with fresh, published or own weights."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from tresnet.checkpoints.load import load_weights
from tresnet.checkpoints.manifest import WeightsInfo, fetch, info, locate
from tresnet.checkpoints.read import read_weights
from tresnet.checkpoints.remap import Weights, to_ours
from tresnet.checkpoints.table import WeightsEntry
from tresnet.errors import CheckpointError, InputError
from tresnet.models.features import FeatureExtractor
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import build, default_pretrained_cfg, find_variant, list_models


def create(
    name: str | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    norm: str = "abn",
    jit: bool = False,
    head: str | None = None,
    head_groups: int | Sequence[int] | None = None,
    head_channels: int | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    global_pool: str | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    width_factor: float | None = None,
    layers: Sequence[int] | None = None,
    block_size: int | None = None,
    new_head: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TResNet | FeatureExtractor:
    """Make a TResNet.

    Where an argument is None, the weights decide, and without weights the variant does.

    Args:
        name: a name out of `list_models()`; None for that of the weights.
        weights: a tag out of `list_weights()` or the path of a file in our format, timm's or the
            public TResNet one; None for fresh weights.
        norm: 'abn' (one saved buffer), 'batchnorm' or 'inplace_abn' (the package).
        jit: run the helper functions as TorchScript.
        head: 'linear', 'group_attention' or 'ml_decoder'; 'linear' without weights.
        head_groups: classes of each group of 'group_attention', or how many groups to spread the
            classes over; 12 without weights.
        head_channels: channels of each group of 'group_attention' (512 without weights), or width
            of the decoder of 'ml_decoder' (768).
        in_chans: channels of the image; 3 without weights. Weights for others are adapted.
        num_classes: width of the classifier, 0 for none; 1000 without weights.
        global_pool: pooling in front of the classifier: 'avg', 'max', 'avgmax' or ''; 'avg' without
            weights.
        drop_rate: dropout in front of the classifier.
        drop_path_rate: stochastic depth of the last block.
        features_only: return feature maps instead of logits.
        out_indices: which maps, or how many of the last; 0 is the stem, 1 to 4 the stages.
        width_factor: channels of the first stage over 64.
        layers: blocks in each of the four stages.
        block_size: side of the stem's space-to-depth block; 2 suits images of about 32 pixels.
        new_head: take all but the head from the weights, and any `num_classes`.
        device: where the parameters live.
        dtype: floating-point type of the parameters.

    Returns:
        The model, in training mode.

    Raises:
        InputError: a name or value is unknown, or contradicts the weights.
        CheckpointError: the weights cannot be had, are damaged or do not fit.
        MissingDependencyError: `norm='inplace_abn'` without the package.
    """
    if out_indices is not None and not features_only:
        raise InputError(f"out_indices={out_indices} needs features_only=True")
    asked: dict[str, Any] = {
        "head": head,
        "head_groups": head_groups,
        "head_channels": head_channels,
        "in_chans": in_chans,
        "num_classes": num_classes,
        "global_pool": global_pool,
        "width_factor": width_factor,
        "layers": layers,
        "block_size": block_size,
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    asked |= {"norm": norm, "jit": jit, "drop_rate": drop_rate, "drop_path_rate": drop_path_rate}
    asked |= {"device": device, "dtype": dtype}
    if weights is None:
        model = _create_fresh(name, new_head, asked)
    else:
        model = _create_loaded(name, weights, new_head, asked)
    return FeatureExtractor(model, out_indices) if features_only else model


def _create_fresh(name: str | None, new_head: bool, asked: dict[str, Any]) -> TResNet:
    if name is None:
        raise InputError(f"expected a name out of {', '.join(list_models())}, or weights")
    if new_head:
        raise InputError("new_head=True needs weights: without them the whole model is new")
    return build(name, **asked)


def _create_loaded(
    name: str | None, weights: str | os.PathLike[str], new_head: bool, asked: dict[str, Any]
) -> TResNet:
    if name is not None:
        find_variant(name)
    read, known = _read(weights)
    _check_name(name, known)
    _check_classes(asked.get("num_classes"), known, new_head)
    kwargs = {**known.kwargs, **_head_kwargs(known, asked), "num_classes": known.num_classes}
    model = build(name or known.model, **{**kwargs, **asked})
    load_weights(model, read, new_head)
    model.pretrained_cfg = _pretrained_cfg(model, known)
    return model


def _read(weights: str | os.PathLike[str]) -> tuple[Weights, WeightsInfo]:
    found = locate(weights)
    if isinstance(found, WeightsEntry):
        read = to_ours(read_weights(fetch(found.tag)))
        return read, info(read, found.tag, found)
    read = to_ours(read_weights(found))
    return read, info(read, os.fspath(weights))


def _check_name(name: str | None, known: WeightsInfo) -> None:
    if name is not None and name != known.model and not known.guessed:
        raise CheckpointError(
            f"{known.name} holds {known.model}, got name={name!r}: leave the name out, or choose "
            f"other weights"
        )


def _check_classes(num_classes: int | None, known: WeightsInfo, new_head: bool) -> None:
    if num_classes in (None, 0, known.num_classes) or new_head:
        return
    raise CheckpointError(
        f"{known.name} has {known.num_classes} classes, got num_classes={num_classes}: leave "
        "num_classes out, or load all but the head with new_head=True"
    )


def _head_kwargs(known: WeightsInfo, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the weights' head as far as they carry over to the head asked for."""
    groups = known.kwargs["head_groups"]
    if asked.get("head", known.kwargs["head"]) != known.kwargs["head"]:
        return {"head_groups": None, "head_channels": None}
    classes = asked.get("num_classes", known.num_classes)
    if groups and classes != known.num_classes:  # as many groups, over the new classes
        groups = min(len(groups), classes) or None
    return {"head_groups": groups or None}


def _pretrained_cfg(model: TResNet, known: WeightsInfo) -> dict[str, Any]:
    """Return how images are prepared for these weights in this model, in timm's terms."""
    config = model.config
    default = default_pretrained_cfg(config.variant, config)
    own = {key: default[key] for key in ("architecture", "num_classes", "mean", "std")}
    size = (config.in_chans, *known.input_size[1:])
    return {**default, **known.pretrained_cfg, **own, "input_size": size}
