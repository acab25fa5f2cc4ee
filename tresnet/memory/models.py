"""Models by name or by object, and what is wrong with those that cannot be predicted."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tresnet.errors import InputError, MissingDependencyError

ModelLike = str | nn.Module | Callable[[], nn.Module]

_DEFAULT_IMAGE_SIZE = 224


def find_model(
    model: ModelLike, options: Mapping[str, object] | None = None
) -> tuple[str, nn.Module]:
    """A printable name, and the model: without data where it is built here.

    Args:
        model: `tresnet_m`, `timm:resnet50`, `torchvision:vgg16_bn`, a module on the CPU or on the
            meta device, or a function that builds one.
        options: keyword arguments for a model given by name, such as `num_classes` or `norm`.

    Raises:
        InputError: an unknown name, a model on a GPU or a wrapped one, or something else.
        MissingDependencyError: a name of a package that is not installed.
    """
    options = dict(options or {})
    if isinstance(model, str):
        return model, _build(model, options)
    if options:
        raise InputError(
            f"model options ({', '.join(options)}) go with a model's name, got an object: "
            "build the model with them"
        )
    if isinstance(model, nn.Module):
        return type(model).__name__, _checked(model)
    if callable(model):
        built = on_meta(model)
        return type(built).__name__, _checked(built)
    raise InputError(
        f"expected a model's name, a torch.nn.Module or a function that builds one, "
        f"got {type(model).__name__}"
    )


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build without data; with data where a constructor reads values it has just made."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError, TypeError):
        return build()


def find_input_size(model: nn.Module, input_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of one input without the batch: (C, H, W), or what was given in full.

    Args:
        model: asked for its channels, and for its size if `input_size` is None.
        input_size: a square's side, (H, W), or a full shape of three or more numbers.

    Raises:
        InputError: not positive whole numbers.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    usual = tuple(config.get("input_size", ())) if isinstance(config, Mapping) else ()
    if input_size is None:
        input_size = usual or _DEFAULT_IMAGE_SIZE
    sizes = (input_size,) if isinstance(input_size, int) else tuple(input_size)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise InputError(
            f"expected an input size of positive whole numbers (224, (H, W) or (C, H, W)), "
            f"got {input_size!r}"
        )
    if len(sizes) > 2:
        return sizes
    square = len(sizes) == 1
    return (_channels(model, usual), *sizes, *(sizes if square else ()))


def _channels(model: nn.Module, usual: tuple[int, ...]) -> int:
    for owner in (getattr(model, "config", None), model):
        channels = getattr(owner, "in_chans", None)
        if isinstance(channels, int):
            return channels
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # A stem that rearranges pixels first has a multiple of the image's channels.
            return usual[0] if usual and module.in_channels % usual[0] == 0 else module.in_channels
    return 3


def _build(name: str, options: dict[str, object]) -> nn.Module:
    bare, at, given = name.partition("@")
    if at:
        raise InputError(
            f"expected a model's name alone, got {name!r}: give the name as {bare!r} and {given!r} "
            "apart, as an option of the command (--norm abn) or in model_options"
        )
    family, _, rest = name.rpartition(":")
    builders = {"timm": _timm, "torchvision": _torchvision, "": _ours, "tresnet": _ours}
    if family not in builders or not rest:
        raise InputError(
            f"expected a name such as 'tresnet_m', 'timm:resnet50' or 'torchvision:vgg16_bn', "
            f"got {name!r}"
        )
    build = builders[family](rest)
    unknown = _unknown_options(build, options)
    if unknown:
        raise InputError(f"{name} takes no option {', '.join(unknown)}")
    return _checked(on_meta(lambda: build(**options)))


def _unknown_options(build: Callable, options: dict[str, object]) -> list[str]:
    accepted = inspect.signature(build).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return []
    return [o for o in options if o not in accepted]


def _timm(name: str) -> Callable[..., nn.Module]:
    try:
        import timm
    except ImportError as error:
        raise MissingDependencyError("timm: models need timm: pip install timm") from error
    if not timm.is_model(name.split(".")[0]):
        raise InputError(f"timm has no model {name!r}: timm.list_models() has the names")
    return lambda **options: timm.create_model(name, **options)


def _torchvision(name: str) -> Callable[..., nn.Module]:
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingDependencyError(
            "torchvision: models need torchvision: pip install torchvision"
        ) from error
    if name not in models.list_models():
        raise InputError(
            f"torchvision has no model {name!r}: torchvision.models.list_models() has the names"
        )
    # Constructors that fetch the weights of a backbone by default must not.
    defaults = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        defaults["weights_backbone"] = None
    return lambda **options: models.get_model(name, **{**defaults, **options})


def _ours(name: str) -> Callable[..., nn.Module]:
    from tresnet.models.zoo import build, list_models

    if name not in list_models():
        raise InputError(
            f"expected a model out of {', '.join(list_models())}, or one of another package as "
            f"'timm:{name}' or 'torchvision:{name}', got {name!r}"
        )
    return lambda **options: build(name, **options)


def _checked(model: nn.Module) -> nn.Module:
    """Refuse what cannot be predicted, with the way out."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InputError(
            f"expected the model itself, got it wrapped in {type(model).__name__}: pass "
            "model.module, and ddp=True for the memory of gradient buckets"
        )
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "expected an eager model, got a compiled one: pass the model before torch.compile; "
            "what a compiler saves is not predicted"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "expected an eager model, got a TorchScript one: pass the model before "
            "torch.jit.script or torch.jit.trace"
        )
    elsewhere = {
        str(t.device)
        for t in (*model.parameters(), *model.buffers())
        if t.device.type not in ("cpu", "meta")
    }
    if elsewhere:
        raise InputError(
            f"expected a model on the CPU or the meta device, got one on "
            f"{', '.join(sorted(elsewhere))}: predict before moving it, or pass model.cpu()"
        )
    return model
