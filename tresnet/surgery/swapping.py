"""Replace the norms of a model by norms of another class, with equal outputs."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tresnet.errors import InputError, listed
from tresnet.layers.hooks import check_model, refuse_hooked, replace_modules
from tresnet.layers.norm import NORMS, InplaceABN, NormAct, norm_class
from tresnet.settings.model import ModelConfig

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_COPIED = (
    "weight", "bias", "running_mean", "running_var", "num_batches_tracked", "track_running_stats",
)  # fmt: skip


def swap_norm(model: ModuleT, norm: str) -> ModuleT:
    """Replace this package's norms in place by the class that `norm` names; return `model`.

    `norm` is 'abn', 'batchnorm' or 'inplace_abn'. Outputs stay equal up to rounding. Parameters and
    buffers stay the same objects, so optimizers and EMAs stay valid. The attribute `runner` of a
    TResNet stays, but runs Triton kernels only while the norm is 'abn'. Swap before compiling or
    scripting, because a compiled or scripted model keeps its old norms.

    Raises:
        InputError: `norm` is unknown; or the model is compiled or has no norms; or a norm has
            hooks, a changed forward or an unknown class; or a gamma is below eps (1e-5), for
            'inplace_abn'. The model is unchanged after every error.
        MissingDependencyError: 'inplace_abn' needs the inplace-abn package.
    """
    target = norm_class(norm)
    check_model(model)
    old = {name: m for name, m in model.named_modules() if name and isinstance(m, NormAct)}
    if not old:
        raise InputError(f"expected norms of tresnet in {type(model).__name__}, found none")
    refuse_hooked(old)
    for name, module in old.items():
        if type(module) not in NORMS.values():
            raise InputError(f"expected norms of tresnet, but {name} is {type(module).__name__}")
    if issubclass(target, InplaceABN):
        _check_gammas(old)
    replace_modules(model, {module: _counterpart(module, target) for module in old.values()})
    for module in model.modules():  # a TResNet, and a feature extractor around it
        if isinstance(config := getattr(module, "config", None), ModelConfig):
            vars(module)["config"] = replace(config, norm=norm)
    return model


def _check_gammas(norms: dict[str, NormAct]) -> None:
    gammas = {name: module._gamma() for name, module in norms.items()}
    faults = [
        f"{name} ({count} of {len(gamma)})"
        for name, gamma in gammas.items()
        if not gamma.is_meta and (count := int((gamma < norms[name].eps).sum()))
    ]
    if faults:
        raise InputError(
            "expected gammas of at least eps (1e-5), the smallest that in-place ABN (|w| + eps) "
            f"can represent; got smaller ones in {listed(faults, 5)}: keep "
            "norm='abn', or build the model with norm='inplace_abn', which starts at eps where "
            "others start at 0"
        )


@torch.no_grad()
def _counterpart(old: NormAct, target: type[NormAct]) -> NormAct:
    new = target(old.num_features, old.slope, eps=old.eps, momentum=old.momentum, device="meta")
    if isinstance(old, InplaceABN):
        old.weight.copy_(old._gamma())  # a weight below eps stands for gamma = 2 eps - weight
    for name in _COPIED:
        setattr(new, name, getattr(old, name))
    return new.train(old.training)
