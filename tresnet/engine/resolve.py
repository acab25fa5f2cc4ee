"""Resolve a configuration: decide what it leaves open, and check that it suits this run.

`decide` needs this machine alone, so that processes can compare their options. `resolve` adds what
the saved run, the weights or the model decide. An automatic batch size is found with the model.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from tresnet import env
from tresnet.checkpoints.weights import WeightsInfo
from tresnet.engine import config as configs
from tresnet.engine.config import AUTO, BALANCED, BUILT_IN, DataConfig, TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.state import BEST, Resumed
from tresnet.errors import ConfigError, InputError
from tresnet.models import zoo
from tresnet.ops.dispatch import obstacle
from tresnet.settings import CROP, EvalTransform, Sides, fields

# A resumed run may change these options: training does not depend on them while all images are
# readable and all steps finite. `data` may name another directory with an equal fingerprint.
FREE_AT_RESUME = {
    "data", "data_root", "data_config", "image_column", "label_column", "label_separator",
    "class_map", "max_image_pixels", "train_split", "val_split",
    "gpu_memory", "workers", "eval_interval", "checkpoint_interval_s", "log_interval",
    "skip_bad_images", "skip_bad_steps", "progress", "tensorboard", "track",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedData(DataConfig):
    """Options of data whose source, image size and resampling filter are known."""

    data: str = dataclasses.field()
    input_size: Sides = dataclasses.field()
    interpolation: Literal["bilinear", "bicubic"] = dataclasses.field()

    @property
    def sizes(self) -> tuple[Sides, ...]:
        """Sizes of training images in order of use."""
        return self.progressive_sizes or (self.input_size,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved(TrainConfig):
    """The complete configuration of a run, as in its config.json."""

    data: ResolvedData = dataclasses.field()


def decide(wanted: TrainConfig, device: torch.device) -> TrainConfig:
    """Return a copy with the precision that `device` decides, and absolute paths."""
    amp = wanted.compute.decided(env.capability(device)).amp
    return configs.replace(wanted, amp=amp, **absolute(wanted))


def check_options(options: TrainConfig, new_head: bool, processes: Processes) -> None:
    """Check what `decide` returned (a collective).

    Raises ConfigError if ranks have unequal options, or for `sync_bn` without a GPU. Raises
    InputError if `impl` is triton and the kernels cannot run.
    """
    if options.compute.sync_bn and processes.device.type != "cuda":
        raise ConfigError(
            "--sync-bn: PyTorch synchronises batch norm on GPUs only, expected a GPU,"
            f" got {processes.device}: leave the option out"
        )
    first, *others = processes.gather({"new_head": new_head, **configs.flatten(options)})
    for rank, other in enumerate(others, start=1):
        if differing := differences(first, other, "{!r} and {!r}"):
            raise ConfigError(
                f"expected the same options in all processes, got {', '.join(differing)} in process"
                f" 0 and {rank}: start all with equal options, and end processes of earlier runs"
            )
    if options.model.impl == "triton" and (reason := obstacle(processes.device, torch.float32)):
        raise InputError(f"impl='triton' {reason}: use impl='auto'")


def resolve(
    options: TrainConfig, weights: WeightsInfo | None = None, saved: Resumed | None = None
) -> Resolved:
    """Return `options` with values for model, input size and test crop where they are None.

    The values are those of the `saved` run, or else of the weights, or else the model's defaults.
    A batch size `auto` takes the saved value, or remains. `resumed` may raise ConfigError.
    """
    model = options.model.model
    if saved is not None:
        filled = resumed(saved.config, options, saved.path.parent / BEST)
    elif weights is not None:
        filled = default_crop(options.data, weights.pretrained_cfg)
        filled["model"] = model or weights.config.variant
    else:
        assert model is not None, "checked by validate"
        cfg = zoo.default_pretrained_cfg(model, zoo.make_config(model))
        filled = default_crop(options.data, cfg)
    config = configs.replace(options, **filled)
    groups: dict[str, Any] = {**vars(config), "data": ResolvedData(**vars(config.data))}
    return Resolved(**groups)


def resumed(saved: TrainConfig, wanted: TrainConfig, best: Path) -> dict[str, Any]:
    """Return values of the `saved` configuration for what `wanted` leaves open in a resumed run.

    Differences outside `FREE_AT_RESUME` raise `ConfigError`, whose message names `best`, the
    path of the best weights. More epochs are allowed if the learning rate is constant and neither
    `mix_off_epochs` nor `progressive_sizes` is set. The warm-up then keeps its number of epochs.
    """
    before, now = configs.flatten(saved) | absolute(saved), configs.flatten(wanted)
    names = ("model", "input_size", *CROP)
    filled = {name: before[name] for name in names if now[name] is None}
    if wanted.data.batch_size == AUTO:
        filled["batch_size"] = before["batch_size"]
    now |= filled
    counts_back = before["mix_off_epochs"] or before["progressive_sizes"]
    endless = before["lr_schedule"] == "constant" and not counts_back
    if endless and now["epochs"] > before["epochs"]:
        warmup_epochs = before["warmup_fraction"] * before["epochs"]
        filled["warmup_fraction"] = warmup_epochs / now["epochs"]
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
    flat, words = configs.flatten(config), (*BUILT_IN, BALANCED)
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
