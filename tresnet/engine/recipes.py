"""Recipes: functions that return a `TrainConfig` with the defaults for one kind of training.

Each recipe's docstring cites its sources. Values without a source are this package's choice.
"""

import dataclasses
from collections.abc import Callable

from tresnet.engine.config import (
    Augment,
    DataConfig,
    DistillConfig,
    LabelConfig,
    RunConfig,
    TrainConfig,
)
from tresnet.errors import ConfigError, check_known
from tresnet.settings import EmaConfig, OptimConfig, ScheduleConfig, Step
from tresnet.settings.fields import replace
from tresnet.settings.model import ModelShape


def paper() -> TrainConfig:
    """Train on ImageNet from random weights, as arXiv 2003.13630 trains TResNet.

    The paper gives input size 224, 300 epochs, SGD, the one-cycle policy, auto-augment, cutout and
    label smoothing. Biases and norms have no weight decay. No mean is subtracted from RGB values
    in [0, 1]. The paper gives no other values. Learning rate 0.1 per 256 images and weight decay
    1e-4 are from arXiv 1706.02677. Mixup 0.2 is from arXiv 1710.09412. Smoothing 0.1 is usual.
    Warm-up fraction 0.2 and EMA decay 0.9997 are from the authors' code for arXiv 2009.14119.
    """
    return TrainConfig(
        recipe="paper",
        model="tresnet_m",
        batch_size=128,
        data=DataConfig(workers=8),
        augment=Augment(auto_augment="original", cutout_prob=0.5, mixup=0.2, label_smoothing=0.1),
        step=Step(
            optim=OptimConfig(opt="sgd", lr=0.1, lr_batch=256, momentum=0.9, weight_decay=1e-4),
            ema=EmaConfig(ema_decay=0.9997),
        ),
        schedule=ScheduleConfig(epochs=300, lr_schedule="one-cycle", warmup_fraction=0.2),
    )


def usi() -> TrainConfig:
    """Train on ImageNet with a teacher, by one recipe for all models (arXiv 2204.03475).

    The paper gives the loss (cross-entropy + 5 KL at temperature 1), 300 epochs, AdamW, mixup,
    cutmix and an EMA. The other values are defaults of train.py in the authors' repository. The
    learning rate rises from 1e-4 to 2e-3 (for 8 x 128 images) over 5 epochs, then falls to 1e-6.
    Weight decay is 2e-2, EMA decay 0.99996 and the test crop 0.95. Each image has three copies
    with RandAugment of magnitude 7, mixup 0.8 and cutmix 1. The authors' teacher is TResNet-L v2.
    """
    return TrainConfig(
        recipe="usi",
        model="tresnet_m",
        batch_size=128,
        data=DataConfig(workers=8, crop_pct=0.95),
        augment=Augment(auto_augment="rand-m7-mstd0.5-inc1", aug_repeats=3, mixup=0.8, cutmix=1.0),
        distill=DistillConfig(kd_weight=5.0, kd_temperature=1.0),
        step=Step(
            optim=OptimConfig(opt="adamw", lr=2e-3, lr_batch=1024, weight_decay=2e-2),
            ema=EmaConfig(ema_decay=0.99996),
        ),
        schedule=_cosine(2e-3),
    )


def _cosine(peak: float) -> ScheduleConfig:
    """From learning rate 1e-4 in 5 epochs to the peak, then in 295 epochs to 1e-6."""
    schedule = ScheduleConfig(epochs=300, lr_schedule="cosine", warmup_fraction=5 / 300)
    return replace(schedule, start_factor=1e-4 / peak, end_factor=1e-6 / peak)


def rsb_a2() -> TrainConfig:
    """Train on ImageNet by procedure A2 of "ResNet strikes back" (arXiv 2110.00476).

    The paper's Table 2 gives binary cross-entropy, and LAMB with weight decay 0.02 and 2048 images
    per step. Learning rate 5e-3 warms up for 5 of 300 epochs, then follows a cosine. Augmentation
    is RandAugment of magnitude 7 (standard deviation 0.5), mixup 0.1, cutmix 1 and three copies of
    each image. Stochastic depth is 0.05 and the test crop 0.95. Label smoothing, dropout, erasing
    and EMA are off. Two values are from the commands published with timm's weights. Warm-up starts
    at learning rate 1e-4, and a class counts as present if its target is above 0.2. The last
    learning rate, 1e-6, is this package's choice.
    """
    return TrainConfig(
        recipe="rsb-a2",
        shape=ModelShape(drop_path_rate=0.05),
        model="tresnet_m",
        batch_size=256,
        data=DataConfig(workers=8, crop_pct=0.95),
        augment=Augment(auto_augment="rand-m7-mstd0.5-inc1", aug_repeats=3, mixup=0.1, cutmix=1.0),
        labels=LabelConfig(loss="one-vs-all", bce_target_thresh=0.2),
        step=Step(optim=OptimConfig(opt="lamb", lr=5e-3, lr_batch=2048, weight_decay=0.02)),
        schedule=_cosine(5e-3),
    )


def in21k() -> TrainConfig:
    """Train on ImageNet-21K with the semantic softmax (arXiv 2104.10972, section 3).

    The values are defaults of train_semantic_softmax.py in the authors' repository: 80 epochs,
    label smoothing 0.2, cutout and RandAugment. A micro-batch has 64 images per GPU. In the first
    tenth of the steps, Adam's learning rate rises from 1.5e-5 to 3e-4 on any number of GPUs. Weight
    decay is 1e-4, but 0 for biases and norms. Images are squashed to 224 x 224 without crops or
    mirroring. The authors start from ImageNet-1K weights, as this recipe does with
    `--weights tresnet_m.miil_in1k`.
    """
    return TrainConfig(
        recipe="in21k",
        model="tresnet_m",
        batch_size=64,
        data=DataConfig(workers=8, crop_mode="squash", crop_pct=1.0),
        augment=Augment(
            random_crop=False,
            hflip=0.0,
            auto_augment="rand-m9",
            cutout_prob=0.5,
            label_smoothing=0.2,
        ),
        labels=LabelConfig(loss="semantic-softmax"),
        step=Step(optim=OptimConfig(opt="adam", lr=3e-4, weight_decay=1e-4)),
        schedule=ScheduleConfig(
            epochs=80,
            lr_schedule="one-cycle",
            warmup_fraction=0.1,
            start_factor=1 / 20,
            end_factor=1 / 20 / 1e4,
        ),
    )


def finetune() -> TrainConfig:
    """Train pretrained weights and a new head on other classes, with a low learning rate."""
    return TrainConfig(
        recipe="finetune",
        batch_size=64,
        augment=Augment(
            crop_scale=(0.35, 1.0),
            auto_augment="rand-m7-mstd0.5",
            cutout_prob=0.25,
            label_smoothing=0.1,
        ),
        step=Step(
            optim=OptimConfig(opt="sgd", lr=0.01, lr_batch=64, momentum=0.9, weight_decay=1e-4),
            ema=EmaConfig(ema_decay=0.9995),
        ),
        schedule=ScheduleConfig(epochs=40, lr_schedule="one-cycle", warmup_fraction=0.2),
    )


def digits() -> TrainConfig:
    """Train tresnet_t on 1797 handwritten digits, on a CPU in under 3 minutes."""
    return TrainConfig(
        recipe="digits",
        shape=ModelShape(block_size=2),
        model="tresnet_t",
        batch_size=64,
        data=DataConfig(data="digits", input_size=32, workers=0),
        augment=Augment(
            random_crop=False,
            hflip=0.0,
            affine_degrees=10.0,
            affine_translate=0.1,
            affine_scale=(0.9, 1.1),
            affine_shear=5.0,
            label_smoothing=0.1,
        ),
        step=Step(
            optim=OptimConfig(opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
            ema=EmaConfig(ema_decay=0.99),
        ),
        schedule=ScheduleConfig(epochs=20, lr_schedule="one-cycle", warmup_fraction=0.2),
        run=RunConfig(log_interval=10),
    )


def multilabel() -> TrainConfig:
    """Train pretrained weights and a new head on images with any number of labels.

    The whole image is shown, because a crop may leave out what a label names.
    """
    return TrainConfig(
        recipe="multilabel",
        batch_size=64,
        augment=Augment(random_crop=False, auto_augment="rand-m9", cutout_prob=0.5),
        labels=LabelConfig(loss="asymmetric"),
        step=Step(
            optim=OptimConfig(opt="adam", lr=1e-4, weight_decay=1e-4),
            ema=EmaConfig(ema_decay=0.9997),
        ),
        schedule=ScheduleConfig(epochs=40, lr_schedule="one-cycle", warmup_fraction=0.2),
    )


def digits_multilabel() -> TrainConfig:
    """Train tresnet_t to label images of one to four digits, on a CPU in 5 minutes."""
    plain = Augment(random_crop=False, hflip=0.0)
    several = dataclasses.replace(digits(), augment=plain, labels=LabelConfig(loss="asymmetric"))
    data = {"data": "digits_multilabel", "input_size": 40}
    return replace(several, recipe="digits-multilabel", epochs=8, **data)


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    make.__name__.replace("_", "-"): make
    for make in (paper, usi, rsb_a2, in21k, finetune, multilabel, digits, digits_multilabel)
}


def recipe(name: str) -> TrainConfig:
    """Return the configuration of a recipe; an unknown name raises ConfigError."""
    check_known("recipe", name, RECIPES, ConfigError)
    return RECIPES[name]()
