"""Recipes: named starting points of a configuration, as functions that return a `TrainConfig`.

The docstrings of paper, usi, rsb-a2 and in21k name the source of every figure; the figures of
finetune, digits and multilabel are this package's choice. `tests/golden/recipes.json` holds the
complete configurations, so that a change of a default shows.
"""

from collections.abc import Callable

from tresnet.engine.config import (
    AugmentConfig,
    ComputeConfig,
    DataConfig,
    DistillConfig,
    EmaConfig,
    LabelConfig,
    NetworkConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from tresnet.errors import ConfigError
from tresnet.settings import fields


def paper() -> TrainConfig:
    """ImageNet from random weights, as arXiv 2003.13630 trains TResNet.

    From the paper's section on ImageNet results: input 224, 300 epochs, SGD, one cycle,
    auto-augment, cutout, label smoothing, "true weight decay" (of weights only), RGB in 0..1
    without mean and standard deviation. The paper gives no values for them. The usual ones are
    taken: 0.1 per 256 images and 1e-4 for SGD (arXiv 1706.02677), smoothing 0.1, mixup 0.2 (arXiv
    1710.09412). The warm-up of 0.2 and the EMA of 0.9997 are from the authors' later training code
    (ASL).
    """
    return TrainConfig(
        recipe="paper",
        model=NetworkConfig(model="tresnet_m"),
        data=DataConfig(batch_size=128, workers=8),
        augment=AugmentConfig(
            auto_augment="original", cutout_prob=0.5, mixup=0.2, label_smoothing=0.1
        ),
        optim=OptimConfig(opt="sgd", lr=0.1, lr_batch=256, momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(epochs=300, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.9997),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def usi() -> TrainConfig:
    """ImageNet with a teacher: one scheme for all models, arXiv 2204.03475.

    From the paper: plain distillation, loss = cross-entropy + 5 KL at temperature 1, 300 epochs,
    AdamW, mixup and cutmix, an EMA. The other values are defaults of train.py in the authors'
    repository: rate 2e-3 for 8 x 128 images, from 1e-4 over 5 epochs, to 1e-6; decay 2e-2,
    RandAugment 7, three repeats, mixup 0.8, cutmix 1, EMA 0.99996, test crop 0.95. Their teacher is
    TResNet-L v2.
    """
    return TrainConfig(
        recipe="usi",
        model=NetworkConfig(model="tresnet_m"),
        data=DataConfig(batch_size=128, workers=8, crop_pct=0.95),
        augment=AugmentConfig(
            auto_augment="rand-m7-mstd0.5-inc1", aug_repeats=3, mixup=0.8, cutmix=1.0
        ),
        distill=DistillConfig(kd_weight=5.0, kd_temperature=1.0),
        optim=OptimConfig(opt="adamw", lr=2e-3, lr_batch=1024, weight_decay=2e-2),
        schedule=ScheduleConfig(
            epochs=300,
            lr_schedule="cosine",
            warmup_fraction=5 / 300,
            start_factor=1e-4 / 2e-3,
            end_factor=1e-6 / 2e-3,
        ),
        ema=EmaConfig(ema_decay=0.99996),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def rsb_a2() -> TrainConfig:
    """ImageNet without a teacher, "ResNet strikes back" (arXiv 2110.00476), procedure A2.

    From its Table 2: test crop 0.95, 300 epochs, 2048 images per optimizer step, LAMB with 5e-3 and
    decay 0.02, cosine, 5 epochs of warm-up, no smoothing, no dropout, stochastic depth 0.05, three
    repeats, RandAugment 7 / 0.5, mixup 0.1, cutmix 1, no erasing, no EMA, binary cross-entropy. The
    first rate, 1e-4, and the threshold 0.2 of mixed labels are from commands published for timm's
    weights. The last rate, 1e-6, is this package's choice.
    """
    return TrainConfig(
        recipe="rsb-a2",
        model=NetworkConfig(model="tresnet_m", drop_path_rate=0.05),
        data=DataConfig(batch_size=256, workers=8, crop_pct=0.95),
        augment=AugmentConfig(
            auto_augment="rand-m7-mstd0.5-inc1", aug_repeats=3, mixup=0.1, cutmix=1.0
        ),
        labels=LabelConfig(loss="one-vs-all", bce_target_thresh=0.2),
        optim=OptimConfig(opt="lamb", lr=5e-3, lr_batch=2048, weight_decay=0.02),
        schedule=ScheduleConfig(
            epochs=300,
            lr_schedule="cosine",
            warmup_fraction=5 / 300,
            start_factor=1e-4 / 5e-3,
            end_factor=1e-6 / 5e-3,
        ),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def in21k() -> TrainConfig:
    """ImageNet-21K with the semantic softmax, arXiv 2104.10972.

    The scheme is that of the paper's section 3. The values are defaults of
    train_semantic_softmax.py in the authors' repository: 80 epochs, Adam with 3e-4 (for 64 images a
    GPU, on any number of GPUs), decay 1e-4 of weights only, smoothing 0.2, cutout and RandAugment.
    One cycle rises for a tenth of the steps, from a twentieth of the peak. Images are squashed to
    224 x 224 without crops or mirroring. They start from ImageNet-1K: `--weights
    tresnet_m.miil_in1k --new-head`.
    """
    return TrainConfig(
        recipe="in21k",
        model=NetworkConfig(model="tresnet_m"),
        data=DataConfig(batch_size=64, workers=8, crop_mode="squash", crop_pct=1.0),
        augment=AugmentConfig(
            random_crop=False,
            hflip=0.0,
            auto_augment="rand-m9",
            cutout_prob=0.5,
            label_smoothing=0.2,
        ),
        labels=LabelConfig(loss="semantic-softmax"),
        optim=OptimConfig(opt="adam", lr=3e-4, weight_decay=1e-4),
        schedule=ScheduleConfig(
            epochs=80,
            lr_schedule="one-cycle",
            warmup_fraction=0.1,
            start_factor=1 / 20,
            end_factor=1 / 20 / 1e4,
        ),
        compute=ComputeConfig(amp="bf16", channels_last=True),
    )


def finetune() -> TrainConfig:
    """Other classes, from pretrained weights: a new head, a lower rate, milder augmentation."""
    return TrainConfig(
        recipe="finetune",
        model=NetworkConfig(new_head=True),
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
        model=NetworkConfig(model="tresnet_t", block_size=2),
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
    """One to four digits on a canvas: any number of labels, on a CPU in 5 minutes."""
    return TrainConfig(
        recipe="multilabel",
        model=NetworkConfig(model="tresnet_t", block_size=2),
        data=DataConfig(data="digits_multilabel", batch_size=64, input_size=40, workers=0),
        augment=AugmentConfig(random_crop=False, hflip=0.0),
        labels=LabelConfig(loss="asymmetric"),
        optim=OptimConfig(opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(epochs=8, lr_schedule="one-cycle", warmup_fraction=0.2),
        ema=EmaConfig(ema_decay=0.99),
        run=RunConfig(log_interval=10),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    make.__name__.replace("_", "-"): make
    for make in (paper, usi, rsb_a2, in21k, finetune, digits, multilabel)
}


def recipe(name: str) -> TrainConfig:
    """Return a recipe's configuration, or raise ConfigError with the nearest name."""
    if name not in RECIPES:
        raise ConfigError(fields.unknown("recipe", name, RECIPES))
    return RECIPES[name]()
