"""A run learns as well as timm's own model, loader, loss, optimizer and schedule do."""

import statistics

import pytest
import timm
import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch
from timm.models.tresnet import TResNet

from tresnet.data import digits
from tresnet.engine import config as configs
from tresnet.engine.recipes import recipe
from tresnet.engine.train import train

EPOCHS, BATCH, LR, DECAY, SMOOTHING = 4, 64, 0.1, 5e-4, 0.1
SEEDS = range(3)
SHAPE = {"layers": (2, 2, 3, 2), "width_factor": 0.25}


def loader(folder, split, training):
    return timm.data.create_loader(
        timm.data.create_dataset("", str(folder), split=split), (3, 32, 32), BATCH,
        is_training=training, no_aug=True, use_prefetcher=False, num_workers=0, crop_pct=1.0,
        mean=(0, 0, 0), std=(1, 1, 1),
    )  # fmt: skip


def by_timm(folder, seed):
    """Return the top-1 accuracy in percent after the loop of timm's training script."""
    timm.utils.random_seed(seed)
    model = TResNet(num_classes=10, **SHAPE)
    batches = loader(folder, "train", True)
    loss = timm.loss.LabelSmoothingCrossEntropy(SMOOTHING)
    optimizer = timm.optim.create_optimizer_v2(model, "sgd", LR, DECAY, 0.9)
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, num_epochs=EPOCHS, step_on_epochs=False, updates_per_epoch=len(batches)
    )
    step = 0
    for _ in range(EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            loss(model.train()(images), labels).backward()
            optimizer.step()
            schedule.step_update(step := step + 1)
    hits = total = 0
    with torch.inference_mode():
        for images, labels in loader(folder, "val", False):
            hits += int((model.eval()(images).argmax(1) == labels).sum())
            total += len(labels)
    return 100 * hits / total


def by_us(folder, seed, runs):
    changes = {
        **SHAPE, "block_size": 4, "data": str(folder), "epochs": EPOCHS, "batch_size": BATCH,
        "lr": LR, "weight_decay": DECAY, "label_smoothing": SMOOTHING, "lr_schedule": "cosine",
        "warmup_fraction": 0.0, "ema_decay": 0.0, "affine_degrees": 0.0, "affine_translate": 0.0,
        "affine_scale": (1.0, 1.0), "affine_shear": 0.0, "eval_interval": EPOCHS, "seed": seed,
        "runs": str(runs), "name": f"seed{seed}", "device": "cpu", "progress": False,
    }  # fmt: skip
    return train(configs.replace(recipe("digits"), **changes)).metrics.top1


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:unclosed file", "ignore:Exception ignored in"
)  # timm's data sets
def test_digits_are_learnt_as_by_timm(tmp_path):
    """Three seeds each; the means may differ by what seeds let them differ, and no more."""
    folder = digits.write(tmp_path)
    ours = [by_us(folder, seed, tmp_path / "runs") for seed in SEEDS]
    theirs = [by_timm(folder, seed) for seed in SEEDS]
    spread = statistics.stdev([x - statistics.mean(ours) for x in ours]
                              + [x - statistics.mean(theirs) for x in theirs])  # fmt: skip
    assert statistics.mean(theirs) > 90
    difference = statistics.mean(ours) - statistics.mean(theirs)

    assert abs(difference) < max(4 * spread * (2 / len(SEEDS)) ** 0.5, 1.0), (ours, theirs)
