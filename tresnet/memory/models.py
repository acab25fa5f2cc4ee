"""Models by name or by object, and what is wrong with those that cannot be predicted."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.models.named import build_named, build_without_data, default_input_shape

ModelLike = str | nn.Module | Callable[[], nn.Module]


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
        MissingDependencyError: an option's package is not installed.
    """
    options = dict(options or {})
    if isinstance(model, str):
        return model, _checked(build_named(model, device="meta", **options))
    if options:
        raise InputError(
            f"model options ({', '.join(options)}) go with a model's name, got an object: "
            "build the model with them"
        )
    if isinstance(model, nn.Module):
        return type(model).__name__, _checked(model)
    if callable(model):
        built = build_without_data(model)
        return type(built).__name__, _checked(built)
    raise InputError(
        f"expected a model's name, a torch.nn.Module or a function that builds one, "
        f"got {type(model).__name__}"
    )


def find_input_size(model: nn.Module, input_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of one input without the batch: (C, H, W), or what was given in full.

    Args:
        model: asked for its channels, and for its size if `input_size` is None.
        input_size: a square's side, (H, W), or a full shape of three or more numbers.

    Raises:
        InputError: not positive whole numbers.
    """
    usual = default_input_shape(model)
    if input_size is None:
        return usual
    sizes = (input_size,) if isinstance(input_size, int) else tuple(input_size)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise InputError(
            f"expected an input size of positive whole numbers (224, (H, W) or (C, H, W)), "
            f"got {input_size!r}"
        )
    if len(sizes) > 2:
        return sizes
    square = len(sizes) == 1
    return (usual[0], *sizes, *(sizes if square else ()))


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
