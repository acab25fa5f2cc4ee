"""Composed weights baked into plain convolutions."""

from torch import nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import check_model, refuse_watched


def fuse(model: nn.Module) -> nn.Module:
    """Replace each `SubtractedConv` of `model` by the `nn.Conv2d` it amounts to, in place.

    Outputs stay the same, to rounding; the factors are gone, so train before.

    Args:
        model: any module, or a `SubtractedConv` itself.

    Returns:
        The model, or, where it is itself a `SubtractedConv`, the convolution.

    Raises:
        InputError: there is nothing to fuse, or something watches or changes it.
    """
    check_model(model)
    refuse_watched(
        {
            name or "the module": module
            for outer, conv in model.named_modules()
            if isinstance(conv, SubtractedConv)
            for name, module in conv.named_modules(prefix=outer)
        }
    )
    if isinstance(model, SubtractedConv):
        return model.to_conv()
    # not named_children, which names a shared child once only
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, SubtractedConv)
    ]
    if not found:
        raise InputError(f"expected a SubtractedConv in {type(model).__name__}, found none")
    # a convolution that several parents share stays shared
    fused = {id(child): child.to_conv() for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, fused[id(child)])
    return model
