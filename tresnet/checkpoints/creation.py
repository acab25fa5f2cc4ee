"""Create models: ours with random, published or a file's weights; timm's and torchvision's."""

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch
from torch import nn

from tresnet.checkpoints.load import fit, install
from tresnet.checkpoints.published import list_weights
from tresnet.checkpoints.weights import WeightsInfo, open_weights
from tresnet.errors import CheckpointError, InputError, check_known, listed
from tresnet.fused import Runner
from tresnet.models.tresnet import TResNet, feature_extractor
from tresnet.models.zoo import DEFAULT_INPUT_SIZE, build, find_variant, list_models
from tresnet.settings import Impl, Recompute
from tresnet.settings.model import ModelConfig, ModelOptions

if TYPE_CHECKING:
    from timm.models._features import FeatureGetterNet

SOURCES = ("tresnet", "timm", "torchvision")
# Options of TResNets, which some models of timm and torchvision would ignore.
_OWN = ("norm", "impl", "recompute", "jit", "head")


def create(
    name: str | None = None,
    *,
    weights: str | os.PathLike[str] | WeightsInfo | None = None,
    new_head: bool = False,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    impl: Impl = "auto",
    recompute: Recompute = "activations",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[ModelOptions],
) -> "TResNet | FeatureGetterNet":
    """Create a TResNet, or an extractor of its feature maps.

    Args:
        name: A name from `list_models()`; None means the name stored with the weights.
        weights: A tag from `list_weights()`, `hf-hub:USER/NAME`, the result of `open_weights`, or a
            path. A path is a directory in timm's layout (also `local-dir:DIR`) or a file in our,
            timm's or the TResNet authors' (public) format. None means random weights.
        new_head: Do not load the head's weights; the head is random, so any `num_classes` is valid.
        features_only: Return a model whose outputs are feature maps instead of logits.
        out_indices: Indices of feature maps (0: stem, 1 to 4: stages), or a number n for the last n
            feature maps. None means 1 to 4.
        impl: 'auto', 'triton' or 'plain': see `tresnet.fused.Runner`.
        recompute: 'none' or 'activations': see `tresnet.fused.Runner`.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
        **options: Fields of `ModelConfig`: norm, jit, head, head_groups, head_channels,
            head_queries, in_chans, num_classes, global_pool, drop_rate, drop_path_rate,
            width_factor, layers, block_size, stem_slope, block_slope. None means the value stored
            with the weights or, without weights, the variant's value. The stem's weights are
            adapted to `in_chans`.

    Returns:
        The model, in training mode.

    Raises:
        InputError: a name or a value is unknown or out of range.
        CheckpointError: the weights cannot be found or downloaded, are damaged, or contradict
            another argument.
        MissingDependencyError: `norm='inplace_abn'` needs the package inplace-abn.
    """
    if out_indices is not None and not features_only:
        raise InputError(f"out_indices={out_indices} needs features_only=True")
    overrides: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    overrides["dtype"] = dtype
    check_known("impl", impl, get_args(Impl))
    check_known("recompute", recompute, get_args(Recompute))
    if "pretrained" in options or (isinstance(name, str) and "." in name):
        variant = None if name is None else name.partition(".")[0]
        raise InputError(
            f"expected published weights by weights=TAG, got create({name!r}, ...) as in timm: "
            f"leave pretrained out; known are {listed(list_weights(variant))}"
        )
    if weights is not None:
        model = _create_loaded(name, open_weights(weights), new_head, overrides, device)
    elif new_head:
        raise InputError("new_head=True needs weights: without weights, the whole model is new")
    elif name is None:
        raise InputError(f"expected a name out of {listed(list_models())}, or weights")
    else:
        model = build(name, **overrides, device=device)
    if impl == "triton" and model.config.norm != "abn":
        raise InputError(f"impl='triton' needs a model with norm='abn', got {model.config.norm!r}")
    model.runner = Runner(impl, recompute)
    return feature_extractor(model, out_indices) if features_only else model


def _create_loaded(
    name: str | None, info: WeightsInfo, new_head: bool, overrides: dict[str, Any], device: Any
) -> TResNet:
    stored = info.config
    if name not in (None, stored.variant) and not info.guessed:
        raise CheckpointError(
            f"{info.name} holds {stored.variant}, got name={name!r}: leave the name out, or choose "
            f"other weights"
        )
    body_only = new_head or overrides.get("num_classes") == 0
    other_classes = overrides.get("num_classes") not in (None, stored.num_classes)
    if other_classes and not body_only and not info.weights.has_other_layers:
        raise CheckpointError(
            f"{info.name} has {stored.num_classes} classes, got "
            f"num_classes={overrides['num_classes']}: leave num_classes out, or load all but the "
            "head with new_head=True"
        )
    options = {**stored.options, **_head_options(stored, overrides), **overrides}
    # Check the weights against a model on the meta device before memory is allocated.
    shape = build(name or stored.variant, **options, device="meta")
    fitted = fit(info.weights, shape, body_only)
    model = build(name or stored.variant, **options, device=device)
    install(model, fitted)
    own = {key: model.pretrained_cfg[key] for key in ("architecture", "num_classes", "mean", "std")}
    own["input_size"] = (model.in_chans, *info.pretrained_cfg["input_size"][1:])
    model.pretrained_cfg = {**info.pretrained_cfg, **own}
    return model


def _head_options(stored: ModelConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    groups: Any = stored.head_groups
    if overrides.get("head", stored.head) != stored.head:
        return {"head_groups": None, "head_channels": None, "head_queries": None}
    classes = overrides.get("num_classes", stored.num_classes)
    if groups and classes != stored.num_classes:  # keep the number of groups, not the sizes
        groups = min(len(groups), classes) or None
    return {"head_groups": groups or None}


def split_name(name: str) -> tuple[str, str]:
    """Split `timm:resnet50` into `('timm', 'resnet50')`; an unknown source raises `InputError`."""
    if not isinstance(name, str):
        raise InputError(f"expected a model's name, got {name!r}")
    source, colon, model = name.rpartition(":")
    if not colon:
        return "tresnet", name
    if source not in SOURCES:
        raise InputError(
            f"expected MODEL, timm:MODEL or torchvision:MODEL, got {name!r}: no source {source!r}"
        )
    return source, model


def check_name(name: str) -> None:
    """Raise `InputError`, with the nearest name, if no model is called `name`."""
    source, model = split_name(name)
    if source == "tresnet":
        try:
            find_variant(model)
        except InputError as error:
            raise InputError(f"{error} (see also timm:NAME and torchvision:NAME)") from None
        return
    library = "timm" if source == "timm" else "torchvision.models"
    # remove a tag of pretrained weights, such as `.a1_in1k`, from the end of a timm name
    name = model.partition(".")[0] if source == "timm" else model
    check_known(f"model of {source}", name, importlib.import_module(library).list_models())


def build_named(
    name: str, *, device: torch.device | str | None = None, **options: Any
) -> nn.Module:
    """Build a model with random weights, without a download; unknown names raise `InputError`.

    `options` are arguments of `tresnet.create`, or of a constructor in timm or torchvision. The
    value None keeps the default. For device `meta`, see `build_without_data`.
    """
    check_name(name)
    source, model = split_name(name)
    options = {key: value for key, value in options.items() if value is not None}
    for key in options if source != "tresnet" else ():
        if key in _OWN:
            raise InputError(f"{name} takes no option {key}")
    construct = functools.partial(_BUILDERS[source], model, **options)
    try:
        if device is not None and torch.device(device).type == "meta":
            return build_without_data(construct)
        with torch.device(device or torch.get_default_device()):
            return construct()
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument(?:\(s\):)? \[?'(\w+)'", str(error))
        if unknown is None:
            raise
        raise InputError(f"{name} takes no option {unknown[1]}") from error


def build_without_data(construct: Callable[[], nn.Module]) -> nn.Module:
    """Construct a model on the meta device, or with data if the constructor needs tensor values."""
    try:
        with torch.device("meta"):
            return construct()
    except (RuntimeError, NotImplementedError, TypeError):
        return construct()


def default_input_shape(model: nn.Module) -> tuple[int, int, int]:
    """Return (C, H, W) of a model's images; H = W = 224 if `pretrained_cfg` has no input_size."""
    config = getattr(model, "pretrained_cfg", None)
    shape = tuple(config.get("input_size") or ()) if isinstance(config, Mapping) else ()
    size = shape[1:] if len(shape) == 3 else (DEFAULT_INPUT_SIZE, DEFAULT_INPUT_SIZE)
    return (_channels(model, shape), *size)


def _channels(model: nn.Module, shape: tuple[int, ...]) -> int:
    for module in model.modules():
        if isinstance(channels := getattr(module, "in_chans", None), int):
            return channels
        if isinstance(module, nn.Conv2d):
            # a multiple of shape[0] means that space-to-depth may precede the first convolution
            return shape[0] if shape and module.in_channels % shape[0] == 0 else module.in_channels
    return 3


def _build_timm(name: str, **options: Any) -> nn.Module:
    import timm

    # call timm's TResNets directly, because `tresnet.timm_plugin` may replace them in the registry
    own = getattr(timm.models.tresnet, name.partition(".")[0], None)
    return timm.create_model(name, **options) if own is None else own(**options)


def _build_torchvision(name: str, **options: Any) -> nn.Module:
    from torchvision import models

    # Unless weights_backbone is None, detectors and segmenters download weights of the backbone.
    takes = inspect.signature(models.get_model_builder(name)).parameters
    without: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in takes else {}
    return models.get_model(name, **{"weights": None, **without, **options})


_BUILDERS = {"tresnet": create, "timm": _build_timm, "torchvision": _build_torchvision}
