"""Models by name: ours, timm's and torchvision's, to be measured and predicted side by side."""

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tresnet.checkpoints.creation import create
from tresnet.errors import CheckpointError, InputError, check_known
from tresnet.models.zoo import DEFAULT_INPUT_SIZE, find_variant

SOURCES = ("tresnet", "timm", "torchvision")
TIMM = "timm:"  # prefix of a name of a model of timm
# Options of TResNets, which some models of timm and torchvision would ignore.
_OWN = ("norm", "impl", "recompute", "jit", "head")


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


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pretrained model of timm; its other attributes are those of a `Checkpoint`."""

    name: str  # such as timm:resnet50
    model: Any
    classes: tuple[str, ...] | None  # those of ImageNet are known by the number of outputs
    pretrained_cfg: dict[str, Any]  # with the image size and the crop of timm's validate.py
    user: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: str = "timm"
    labels: str = "single"  # one label per image

    @property
    def num_classes(self) -> int:
        return self.model.num_classes


def open_pretrained(name: str, classes: Sequence[str] | None = None) -> Pretrained:
    """Build timm's pretrained model `name`, downloaded if needed; `classes` name its outputs.

    InputError: the name is unknown, or the model is not for RGB images. CheckpointError: timm
    cannot give its weights, or has another number of classes.
    """
    import timm
    from timm.data import resolve_data_config
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    check_name(name)
    try:
        model: Any = timm.create_model(name.removeprefix(TIMM), pretrained=True)
    except Exception as error:  # the download or timm may raise an error of any type
        raise CheckpointError(
            f"{name}: timm cannot give its pretrained weights ({type(error).__name__}: {error})"
        ) from error
    cfg = dict(resolve_data_config(model=model, use_test_size=True))
    if cfg["input_size"][0] != 3:
        raise InputError(f"expected a model for RGB, but {name} takes {cfg['input_size'][0]}")
    if classes is not None and len(classes) != model.num_classes:
        raise CheckpointError(
            f"expected the names of the {model.num_classes} classes of {name}, got {len(classes)}:"
            " check --class-map"
        )
    if classes is None and (subset := infer_imagenet_subset(model)):
        classes = ImageNetInfo(subset).label_names()
    return Pretrained(name, model, None if classes is None else tuple(classes), cfg)


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
