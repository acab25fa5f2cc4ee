"""Load all weights of a file into a model, or raise an error and change nothing."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.checkpoints.fit import fit
from tresnet.checkpoints.remap import Weights, read_weights
from tresnet.errors import CheckpointError, InputError
from tresnet.layers.folded_conv import FoldedConv
from tresnet.models.features import FeatureExtractor
from tresnet.models.tresnet import TResNet


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str], new_head: bool = False) -> None:
    """Load a file of weights in our, timm's or the public TResNet format into `model`.

    The activations' negative slopes, which belong to the weights, are also set. Tensors are
    converted to the model's dtypes and devices. The stem's weights are adapted to the model's
    number of image channels. A model without a classifier ignores the file's classifier.

    Args:
        model: A TResNet, or a wrapper of one (compiled, DistributedDataParallel, features only).
        path: A safetensors file, or a torch file without code.
        new_head: Leave the head of `model` unchanged.

    Raises:
        CheckpointError: the file is unreadable, holds code or does not fit; `model` is unchanged.
        InputError: `model` is not a TResNet.
    """
    load_weights(bare_model(model), read_weights(path), new_head)


def load_weights(model: TResNet, weights: Weights, new_head: bool = False) -> None:
    """Load the result of `read_weights`; see `load_checkpoint`."""
    tensors = model_tensors(model)
    install(model, fit(weights, model, tensors, new_head))
    model.set_slopes(*weights.slopes)


def install(model: TResNet, staged: Mapping[str, Tensor]) -> None:
    """Copy the result of `fit` into the model; raise CheckpointError for a model on `meta`."""
    tensors = model_tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise CheckpointError(
            "the model is on the meta device, which holds no values: build it on a real one, or "
            "call model.to_empty(device=...) before loading"
        )
    with torch.no_grad():
        for name, value in staged.items():
            tensors[name].copy_(value)


def model_tensors(model: TResNet) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers by name.

    `state_dict` is not called, because with norm='inplace_abn' it changes the model's weights.
    """
    if any(isinstance(module, FoldedConv) for module in model.modules()):
        raise InputError(
            "expected a model with its norms, got one folded by tresnet.surgery.fold, which no "
            "checkpoint fits: load into the model before folding it, and save that one"
        )
    names = {}
    for prefix, module in model.named_modules():
        prefix = f"{prefix}.".replace("_orig_mod.", "").removeprefix(".")
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names[prefix + name] = tensor
    return names


def bare_model(model: nn.Module) -> TResNet:
    """Return the TResNet inside wrappers (compiled, data-parallel, EMA), or raise `InputError`."""
    inner: Any = model
    while not isinstance(inner, TResNet):
        name = "model" if isinstance(inner, FeatureExtractor) else "_orig_mod"
        inner = getattr(inner, name, None) or getattr(inner, "module", None)
        if inner is None:
            raise InputError(
                f"expected a TResNet from tresnet.create, got {type(model).__name__}: a scripted "
                "or exported model keeps its weights inside"
            )
    return inner
