"""Named starting points of a configuration. A recipe is a function that returns a `TrainConfig`."""

import json
import sys
from collections.abc import Callable

from tresnet.engine import fields
from tresnet.engine.config import (
    AugmentConfig,
    ComputeConfig,
    DataConfig,
    EmaConfig,
    LabelConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from tresnet.errors import ConfigError


def paper() -> TrainConfig:
    """ImageNet from random weights, as arXiv 2003.13630 trains TResNet.

    From the paper's section on ImageNet results: input 224, 300 epochs, SGD, one cycle,
    auto-augment, cutout, label smoothing, "true weight decay" (on weights alone), RGB in 0..1
    without mean and standard deviation. The paper gives no figures for them; these are the usual
    ones: 0.1 per 256 images and 1e-4 for SGD (arXiv 1706.02677), smoothing 0.1, mixup 0.2 (arXiv
    1710.09412), and from the authors' later training code (ASL) a warm-up of 0.2 and an average
    of 0.9997.
    """
    return TrainConfig(
        recipe="paper",
        model=ModelConfig(model="tresnet_m"),
        data=DataConfig(batch_size=128, workers=8),
        augment=AugmentConfig(
            auto_augment="original", cutout_prob=0.5, mixup=0.2, label_smoothing=0.1
        ),
        optim=OptimConfig(opt="sgd", lr=0.1, lr_batch=256, momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(epochs=300, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.9997),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def finetune() -> TrainConfig:
    """Other classes, from pretrained weights: a new head, a lower rate, milder augmentation."""
    return TrainConfig(
        recipe="finetune",
        model=ModelConfig(new_head=True),
        data=DataConfig(batch_size=64),
        augment=AugmentConfig(
            crop_scale=(0.35, 1.0),
            auto_augment="rand-m7-mstd0.5",
            cutout_prob=0.25,
            label_smoothing=0.1,
        ),
        optim=OptimConfig(opt="sgd", lr=0.01, lr_batch=64, momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(epochs=40, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.9995),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def digits() -> TrainConfig:
    """1797 handwritten digits with tresnet_t, on a CPU in under 3 minutes."""
    return TrainConfig(
        recipe="digits",
        model=ModelConfig(model="tresnet_t", block_size=2),
        data=DataConfig(data="digits", batch_size=64, input_size=32, workers=0),
        augment=AugmentConfig(
            random_crop=False,
            hflip=0.0,
            affine_degrees=10.0,
            affine_translate=0.1,
            affine_scale=(0.9, 1.1),
            affine_shear=5.0,
            label_smoothing=0.1,
        ),
        optim=OptimConfig(opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(epochs=20, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.99),
        compute=ComputeConfig(channels_last=True),
        run=RunConfig(log_interval=10),
    )


def multilabel() -> TrainConfig:
    """Which digits are on a canvas of one to four: any number of labels, on a CPU in 5 minutes."""
    return TrainConfig(
        recipe="multilabel",
        model=ModelConfig(model="tresnet_t", block_size=2),
        data=DataConfig(data="digits_multilabel", batch_size=64, input_size=40, workers=0),
        augment=AugmentConfig(random_crop=False, hflip=0.0),
        labels=LabelConfig(loss="asymmetric"),
        optim=OptimConfig(opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(epochs=8, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.99),
        run=RunConfig(log_interval=10),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "paper": paper,
    "finetune": finetune,
    "digits": digits,
    "multilabel": multilabel,
}


def recipe(name: str) -> TrainConfig:
    """The configuration of a recipe.

    Raises:
        ConfigError: No recipe has that name; the message suggests the nearest.
    """
    if name not in RECIPES:
        raise ConfigError(fields.unknown("recipe", name, RECIPES))
    return RECIPES[name]()


if __name__ == "__main__":
    resolved = {name: make().to_dict() for name, make in RECIPES.items()}
    sys.stdout.write(json.dumps(resolved, indent=2) + "\n")
