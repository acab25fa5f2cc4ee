"""Create models: ours with random, published or a file's weights; timm's and torchvision's."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch

from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.checkpoints.fit import fit, install
from tresnet.checkpoints.locate import list_weights
from tresnet.devices import usable_device
from tresnet.errors import CheckpointError, InputError, check_known, listed
from tresnet.fused import Runner
from tresnet.models.heads import build_head
from tresnet.models.tresnet import TResNet, feature_extractor
from tresnet.models.zoo import build, list_models
from tresnet.settings import Impl, Recompute
from tresnet.settings.model import ModelOptions

if TYPE_CHECKING:
    from timm.models._features import FeatureGetterNet

_log = logging.getLogger(__name__)


def create(
    name: str | None = None,
    *,
    weights: str | os.PathLike[str] | Checkpoint | None = None,
    new_head: bool = False,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    impl: Impl = "auto",
    recompute: Recompute = "activations",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[ModelOptions],
) -> "TResNet | FeatureGetterNet":
    """Create a TResNet in training mode, or an extractor of its feature maps.

    Args:
        name: A name from `list_models()`; None means the name stored with the weights.
        weights: A tag from `list_weights()`, `hf-hub:USER/NAME`, the result of `open_checkpoint`,
            or a path. A path is a directory in timm's layout (also `local-dir:DIR`) or a file in
            our, timm's or the TResNet authors' (public) format. None means random weights.
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
    _refuse_timm_arguments(name, options)
    if weights is not None:
        model = _create_loaded(name, open_checkpoint(weights), new_head, overrides, device)
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


def _refuse_timm_arguments(name: str | None, options: Mapping[str, object]) -> None:
    if "pretrained" in options or (isinstance(name, str) and "." in name):
        variant = None if name is None else name.partition(".")[0]
        raise InputError(
            f"expected published weights by weights=TAG, got create({name!r}, ...) as in timm: "
            f"leave pretrained out; known are {listed(list_weights(variant))}"
        )


def _create_loaded(
    name: str | None, checkpoint: Checkpoint, new_head: bool, overrides: dict[str, Any], device: Any
) -> TResNet:
    stored, classes = checkpoint.config, overrides.get("num_classes")
    if name not in (None, stored.variant) and not checkpoint.guessed:
        raise CheckpointError(
            f"{checkpoint.name} holds {stored.variant}, got name={name!r}: leave the name out, or "
            f"choose other weights"
        )
    body_only = new_head or classes == 0
    if not (body_only or checkpoint.other_layers or classes in (None, stored.num_classes)):
        raise CheckpointError(
            f"{checkpoint.name} has {stored.num_classes or 'no head, so 0'} classes, got "
            f"num_classes={classes}: leave num_classes out, or load all but the head with "
            "new_head=True"
        )
    if checkpoint.normalised_by:
        text = (
            f"expected mean 0 and std 1, got {checkpoint.name} for images {checkpoint.pixels}, "
            "while this package feeds images in [0, 1] as they are: fine-tune them on such images, "
            "with a new head, or normalise yourself and load the file of weights by "
            "tresnet.load_checkpoint(model, FILE)"
        )
        if not body_only:
            raise CheckpointError(text)
        _log.warning(text)
    head_options: dict[str, Any] = {"head_groups": stored.head_groups or None}
    if overrides.get("head", stored.head) != stored.head:
        head_options = dict.fromkeys(("head_groups", "head_channels", "head_queries"))
    elif classes not in (None, stored.num_classes):  # keep the number of groups, not the sizes
        head_options = {"head_groups": min(len(stored.head_groups), classes) or None}
    options = {**stored.options, **head_options, **overrides}
    # Check the weights against a model without memory, which then gets memory without values.
    model = build(name or stored.variant, **options, device="meta")
    fitted = fit(checkpoint, model, body_only)
    if not str(device).startswith("meta"):
        device = usable_device(torch.get_default_device() if device is None else device)
        model.to_empty(device=device)
        if body_only:
            dtype = overrides["dtype"]
            model.head = build_head(model.num_features, model.config, device=device, dtype=dtype)
    install(model, fitted)
    cfg, names = dict(checkpoint.pretrained_cfg), ["architecture", "num_classes"]
    if model.in_chans != stored.in_chans or "pixel_dtype" not in cfg:
        names += ["mean", "std"]
        cfg.pop("pixel_dtype", None)
    own = {key: model.pretrained_cfg[key] for key in names}
    own["input_size"] = (model.in_chans, *cfg["input_size"][1:])
    model.pretrained_cfg = cfg | own
    return model
