"""Load all weights of a file into a model, or raise an error and change nothing."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.checkpoints.fit import fit, model_tensors
from tresnet.checkpoints.remap import Weights, read_weights
from tresnet.errors import CheckpointError, InputError
from tresnet.models.tresnet import TResNet


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str], new_head: bool = False) -> None:
    """Load a file of weights in our, timm's or the public TResNet format into `model`.

    Leaky ReLUs get the negative slopes with which the weights were trained. Tensors are converted
    to the model's dtypes and devices. The stem's weights are adapted to the model's number of image
    channels. A model without a classifier ignores the file's classifier.

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
    load_weights(bare_model(model), read_weights(path), new_head)


def load_weights(model: TResNet, weights: Weights, new_head: bool = False) -> None:
    """Load the result of `read_weights` into `model`; raise errors as `load_checkpoint` does."""
    install(model, fit(weights, model, new_head))
    model.set_slopes(*weights.slopes)


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
