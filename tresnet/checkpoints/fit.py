"""Check weights against a model, key by key; adapt stem weights and in-place ABN's gammas."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tresnet.checkpoints.remap import INPLACE_ABN_EPS, Weights, architecture, identify
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.layers.folded_conv import FoldedConv
from tresnet.models.tresnet import STAGES, TResNet

STEM = "body.conv1.conv.weight"
HEAD = "head."


def fit(weights: Weights, model: TResNet, new_head: bool) -> dict[str, Tensor]:
    """Return the tensors of `weights`, with the names and shapes of `model_tensors(model)`.

    `model` is not changed and may be on the meta device. If `new_head`, the head's tensors are left
    out. CheckpointError: the weights do not fit the model.
    """
    expected = model_tensors(model)
    tensors = _without_absent_parts(dict(weights.tensors), model, expected)
    if new_head:
        expected = {name: t for name, t in expected.items() if not name.startswith(HEAD)}
        tensors = {name: t for name, t in tensors.items() if not name.startswith(HEAD)}
    _check_block_size(weights, model)
    if STEM in tensors:
        tensors[STEM] = _fit_stem(tensors[STEM], weights, model)
    tensors = with_counts_of(expected, tensors)
    if faults := misfits(tensors, expected):
        raise CheckpointError(
            f"{weights.path} does not fit. {_advice(weights, model, tensors.keys() ^ expected)}"
            f"Keys, {'; '.join(faults)}"
        )
    if model.config.norm == "inplace_abn":
        tensors = _fit_inplace_gammas(tensors, weights)
    _check_values(tensors, expected, weights)
    return tensors


def model_tensors(model: TResNet) -> dict[str, Tensor]:
    """Return a dict of parameters and persistent buffers; a folded model raises InputError.

    Unlike `state_dict()`, this function does not change weights of a model with in-place ABN.
    """
    if any(isinstance(module, FoldedConv) for module in model.modules()):
        raise InputError(
            "expected a model with norms, got a model folded by tresnet.surgery.fold, which has no "
            "checkpoints: load and save the model before folding"
        )
    names = {}
    for prefix, module in model.named_modules():
        prefix = f"{prefix}.".replace("_orig_mod.", "").removeprefix(".")
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names[prefix + name] = tensor
    return names


def with_counts_of(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return `tensors` with the counts of batches that `expected` has; unknown counts are 0.

    The public format has no counts, and neither have norms that timm's `freeze` froze. A count has
    no effect on the model.
    """
    counts = {name for name in {*expected, *tensors} if name.endswith(".num_batches_tracked")}
    present = {
        name: tensor for name, tensor in tensors.items() if name in expected or name not in counts
    }
    missing = counts & expected.keys() - present.keys()
    return present | {name: torch.zeros((), dtype=torch.int64) for name in missing}


def _without_absent_parts(
    tensors: dict[str, Tensor], model: TResNet, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    absent = tuple(f"body.{stage}." for stage in STAGES if not hasattr(model.body, stage))
    if model.num_classes == 0 and not any(name.startswith(HEAD) for name in expected):
        absent += (HEAD,)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(absent)}


def _check_block_size(weights: Weights, model: TResNet) -> None:
    """Raise CheckpointError if block sizes differ; stems of equal shape can hide the difference."""
    stored, wanted = identify(weights.tensors), architecture(model.config)
    if stored.body != wanted.body:  # `misfits` will report that the layers differ
        return
    trained = 4 if weights.format == "public" else None
    if weights.config is not None:
        trained = weights.config.block_size
    if trained is not None and trained != model.config.block_size:
        raise CheckpointError(
            f"{weights.path} was trained with block_size={trained}, the model has "
            f"block_size={model.config.block_size}: build a model with block_size={trained}"
        )


def _fit_stem(stem: Tensor, weights: Weights, model: TResNet) -> Tensor:
    inputs, pixels = identify({STEM: stem}).stem_channels, model.config.block_size**2
    source = inputs // pixels if weights.config is None else weights.config.in_chans
    if not source or inputs != pixels * source:
        return stem
    return adapt_stem(stem, source, model.config.in_chans)


def adapt_stem(stem: Tensor, source: int, target: int) -> Tensor:
    """Adapt the stem's weights from `source` to `target` image channels, in at least float32.

    Dimension 1 of `stem` has length block_size**2 * source: all channels of the first pixel, then
    all channels of the next pixel, and so on. If `target` is 1, weights are summed over channels,
    so that a grey image gives the output of an RGB image with equal channels. Otherwise the
    channels' weights are repeated cyclically and multiplied by source / target.
    """
    if source == target:
        return stem
    out_channels, inputs, height, width = stem.shape
    pixels = inputs // source
    wide = stem.to(torch.promote_types(stem.dtype, torch.float32))
    wide = wide.reshape(out_channels, pixels, source, height, width)
    if target == 1:
        adapted = wide.sum(dim=2, keepdim=True)
    else:
        order = torch.arange(target) % source
        adapted = wide[:, :, order] * (source / target)
    return adapted.reshape(out_channels, pixels * target, height, width)


def misfits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Describe tensors that are missing, unknown, or of another shape or kind (float, integer)."""
    both = [name for name in expected if name in tensors]
    groups = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": [name for name in tensors if name not in expected],
        "of another shape": [
            f"{name} (expected {tuple(expected[name].shape)}, got {tuple(tensors[name].shape)})"
            for name in both
            if expected[name].shape != tensors[name].shape
        ],
        "of another kind of number": [
            f"{name} ({tensors[name].dtype})"
            for name in both
            if expected[name].is_floating_point() != tensors[name].is_floating_point()
        ],
    }
    return [f"{len(keys)} {what}: {listed(keys)}" for what, keys in groups.items() if keys]


def _advice(weights: Weights, model: TResNet, unmatched: Collection[str]) -> str:
    stored, wanted = identify(weights.tensors), architecture(model.config)
    if stored.body != wanted.body:
        hint = f": create the model as {stored.variant!r}" if stored.variant else ""
        return f"It holds {stored}, expected {wanted}{hint}. "
    if stored.num_classes != wanted.num_classes:
        return (
            f"It has {stored.num_classes} classes, expected {wanted.num_classes}: build the model "
            f"with num_classes={stored.num_classes}, or load all but the head with new_head=True. "
        )
    if stored.stem_channels != wanted.stem_channels:
        return (
            f"Its stem has {stored.stem_channels} inputs, expected {wanted.stem_channels} "
            f"(block_size={model.config.block_size}, in_chans={model.config.in_chans}): build the "
            "model with the block_size the file was trained with. "
        )
    if unmatched and all(name.startswith(HEAD) for name in unmatched):
        return (
            f"It has another head than head={model.config.head!r}: build the model with the file's "
            "head, or load all but the head with new_head=True. "
        )
    return ""


def _fit_inplace_gammas(tensors: dict[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """Set gammas below 1e-5, in-place ABN's minimum, to 1e-5; a negative gamma is an error."""
    gammas = {name: tensors[name] for name in tensors if name.endswith(".bn.weight")}
    if negative := [name for name, gamma in gammas.items() if bool((gamma < 0).any())]:
        raise CheckpointError(
            f"{weights.path} has negative gammas, which norm='inplace_abn' cannot "
            f"represent: build the model with norm='abn'. Layers: {listed(negative)}"
        )
    return tensors | {name: gamma.clamp(min=INPLACE_ABN_EPS) for name, gamma in gammas.items()}


def _check_values(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], weights: Weights
) -> None:
    """Raise CheckpointError for negative variances or values that overflow the model's dtype."""
    variances = [name for name in tensors if name.endswith(".running_var")]
    if below := [name for name in variances if bool((tensors[name] < 0).any())]:
        raise CheckpointError(
            f"{weights.path} has negative variances, so the file is damaged: copy or download it "
            f"again. Keys: {listed(below)}"
        )
    narrow = [
        name
        for name, tensor in tensors.items()
        if expected[name].is_floating_point()
        and torch.finfo(tensor.dtype).max > torch.finfo(expected[name].dtype).max
        and bool((tensor.isfinite() & ~tensor.to(expected[name].dtype).isfinite()).any())
    ]
    if narrow:
        raise CheckpointError(
            f"{weights.path} has values beyond the range of {expected[narrow[0]].dtype}: "
            f"build the model in float32. Keys: {listed(narrow)}"
        )
