"""Resolve a configuration: decide what it leaves open, and check that it suits this run.

`agreed` asks this machine, and `fill` the saved run, the weights or the model. Only an automatic
batch size is then open: `batch_size.resolve` predicts it, once data and model are known.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tresnet import devices
from tresnet.checkpoints.describe import Checkpoint
from tresnet.engine.config import (
    AUTO,
    BALANCED,
    BUILT_IN,
    Filled,
    ResolvedData,
    TrainConfig,
)
from tresnet.engine.distributed import Processes
from tresnet.engine.state import BEST, Saved
from tresnet.errors import ConfigError, InputError
from tresnet.models import zoo
from tresnet.ops.dispatch import obstacle
from tresnet.settings import CROP, EvalTransform, fields
from tresnet.settings.fields import flatten, replace

# A resumed run may change these options: training does not depend on them while all images are
# readable and all steps finite. `data` may name another directory with an equal fingerprint.
FREE_AT_RESUME = {
    "data", "data_root", "data_config", "image_column", "label_column", "label_separator",
    "outside_paths", "class_map", "max_image_pixels", "train_split", "val_split",
    "gpu_memory", "workers", "eval_interval", "checkpoint_interval_s", "log_interval",
    "skip_bad_images", "skip_bad_steps", "progress", "tensorboard", "track",
}  # fmt: skip


def agreed(wanted: TrainConfig, new_head: bool, processes: Processes) -> TrainConfig:
    """Return `wanted` with the precision that the device decides (a collective).

    Raises ConfigError if ranks have unequal options, or GPUs that decide on unequal precisions, or
    for `sync_bn` without a GPU. Raises InputError if `impl` is triton and the kernels cannot run.
    """
    device, compute = processes.device, wanted.step.compute
    if wanted.machine.sync_bn and device.type != "cuda":
        raise ConfigError(
            "--sync-bn: PyTorch synchronises batch norm on GPUs only, expected a GPU,"
            f" got {device}: leave the option out"
        )
    if wanted.step.build.impl == "triton" and (reason := obstacle(device, torch.float32)):
        raise InputError(f"impl='triton' {reason}: use impl='auto'")
    amp = compute.decided(devices.capability(device)).amp
    own = {"new_head": new_head, **flatten(wanted), "amp": amp}
    wanted = replace(wanted, amp=amp)
    first, *others = processes.gather(own)
    for rank, other in enumerate(others, start=1):
        if differing := differences(first, other, "{!r} and {!r}"):
            raise ConfigError(
                f"expected the same options in all processes, got {', '.join(differing)} in process"
                f" 0 and {rank}: start all with equal options, and end processes of earlier runs"
            )
    return wanted


def fill(
    wanted: TrainConfig, weights: Checkpoint | None = None, saved: Saved | None = None
) -> Filled:
    """Return `wanted` with absolute paths, and with values for what it leaves open.

    Model, input size and test crop are those of the `saved` run, or else of the weights, or else
    the model's defaults. A batch size `auto` takes the saved value, or remains. ConfigError:
    options differ from those of the `saved` run; `resumed` says which may.
    """
    changes: dict[str, Any] = absolute(wanted)
    if saved is not None:
        changes |= resumed(saved.config, flatten(wanted) | changes, saved.path.parent / BEST)
    else:
        model = wanted.model or (weights and weights.config.variant)
        assert model is not None, "checked by validate"
        default = zoo.default_pretrained_cfg(model, zoo.make_config(model))
        cfg = default if weights is None else weights.pretrained_cfg
        changes |= {"model": model, **default_crop(wanted.data, cfg)}
        if wanted.shape.in_chans is None and cfg["input_size"][0] != 3:
            changes["in_chans"] = cfg["input_size"][0]
    groups: dict[str, Any] = vars(replace(wanted, **changes))
    return Filled(**{**groups, "data": ResolvedData(**vars(groups["data"]))})


def resumed(saved: TrainConfig, now: dict[str, Any], best: Path) -> dict[str, Any]:
    """Return values of the `saved` configuration for the options that are open in `now`.

    `now` has the value of each option by name. Differences outside `FREE_AT_RESUME` raise
    `ConfigError`, whose message names `best`, the path of the best weights. More epochs are allowed
    if the learning rate is constant and neither `mix_off_epochs` nor `progressive_sizes` is set.
    The warm-up then keeps its number of epochs.
    """
    before = flatten(saved) | absolute(saved)
    names = ("model", "in_chans", "input_size", *CROP)
    filled = {name: before[name] for name in names if now[name] is None}
    if now["batch_size"] == AUTO:
        filled["batch_size"] = before["batch_size"]
    now = now | filled
    counts_back = before["mix_off_epochs"] or before["progressive_sizes"]
    endless = before["lr_schedule"] == "constant" and not counts_back
    if endless and now["epochs"] > before["epochs"]:
        filled["warmup_fraction"] = before["warmup_fraction"] * before["epochs"] / now["epochs"]
        before["epochs"] = now["epochs"]
    if differing := differences(before, now, "was {!r}, now {!r}"):
        raise ConfigError(
            "a run is resumed with the configuration it began with, but these options differ:\n  "
            + "\n  ".join(differing)
            + "\nleave them out to continue the run, or start a new one"
            f" (--weights {best} starts it from this one's weights); more --epochs are for a run of"
            " --lr-schedule constant without --mix-off-epochs and --progressive-sizes"
        )
    return filled


def default_crop(data: EvalTransform, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields that are None in `data`, from `cfg` (a timm `pretrained_cfg`)."""
    values = {name: cfg[name] for name in CROP}
    if data.input_size is None:
        values["input_size"] = zoo.image_size(cfg)
    return {name: value for name, value in values.items() if getattr(data, name) is None}


def absolute(config: TrainConfig) -> dict[str, Any]:
    """Return the absolute paths of existing data and option files, to resume anywhere."""
    flat, words = flatten(config), (*BUILT_IN, BALANCED)
    names = ("data", "class_map", "hierarchy", "class_weights", "teacher")
    named = [name for name in names if flat[name] not in words]
    return {name: os.path.abspath(flat[name]) for name in named if os.path.exists(flat[name] or "")}


def differences(first: dict[str, Any], other: dict[str, Any], text: str) -> list[str]:
    """Describe each differing option not in FREE_AT_RESUME; `text` formats its two values."""
    return [
        f"{fields.option(name)} {text.format(value, other[name])}"
        for name, value in first.items()
        if name not in FREE_AT_RESUME and value != other[name]
    ]
