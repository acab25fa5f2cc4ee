"""The run's images: the data set by its name, its transforms, loaders and fingerprint."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

import torch

from tresnet.data import (
    EvalTransform,
    ImageDataset,
    Loader,
    TrainAugment,
    check_same_classes,
    create_loader,
    digits,
    eval_transform,
    open_folder,
    train_transform,
)
from tresnet.data import digits_multilabel as digits_multi
from tresnet.data.folder import class_folders
from tresnet.data.multilabel import MultiLabelDataset, check_same_order, open_multilabel
from tresnet.engine.config import AugmentConfig, TrainConfig
from tresnet.engine.distributed import Processes

_WRITTEN = {"digits": digits.write, digits_multi.NAME: digits_multi.write}


@dataclasses.dataclass(frozen=True)
class Images:
    """What a run trains and is tested on.

    Attributes:
        train: Loader of this process's share of the training images.
        val: Loader of this process's share of the others.
        classes: Names in the order of the labels.
        counts: Images in train and in val, over all processes.
        fingerprint: Changes with the names, order or classes of the training files.
    """

    train: Loader
    val: Loader
    classes: list[str]
    counts: tuple[int, int]
    fingerprint: str


def locate(data: str, root: str, processes: Processes) -> Path:
    """The folder with the splits; the digits are written by one process while the others wait.

    Raises:
        DataError: The digits' place holds something else.
        MissingDependencyError: The digits are not written and scikit-learn is not installed.
    """
    if data not in _WRITTEN:
        return Path(data)
    if processes.is_main:
        _WRITTEN[data](root)
    processes.wait()
    return Path(root) / data


def class_names(config: TrainConfig) -> list[str]:
    """The classes that `open_images` will find; no image is looked for and nothing is written.

    Raises:
        DataError: The folder or the file with the labels is missing.
    """
    data = config.data.data
    assert data is not None, "checked by validate"
    if data in _WRITTEN:
        return list(digits.CLASSES)
    if config.labels.multi:
        return open_multilabel(data, "train").classes
    return class_folders(Path(data), Path(data) / "train")


def open_images(config: TrainConfig, processes: Processes) -> Images:
    """Open both splits of a resolved configuration.

    Raises:
        DataError: A folder is missing or empty, or the splits have different classes.
    """
    data = config.data
    assert data.data is not None, "checked by validate"
    assert data.input_size is not None, "filled in by resolve"
    folder = locate(data.data, data.data_root, processes)
    changes = augmentation(config.augment, data.input_size, data.interpolation)
    test = testing(data.input_size, data.crop_mode, data.crop_pct, data.interpolation)
    multi = config.labels.multi
    opened, check = (
        (open_multilabel, check_same_order) if multi else (open_folder, check_same_classes)
    )
    train = opened(
        folder, "train", train_transform(changes, dtype=torch.uint8), data.skip_bad_images
    )
    val = opened(folder, "val", eval_transform(test, dtype=torch.uint8), data.skip_bad_images)
    check(train, val)
    shared = {
        "workers": data.workers,
        "seed": config.run.seed,
        "distributed": (processes.rank, processes.world),
        "pin_memory": processes.device.type == "cuda",
    }
    return Images(
        create_loader(train, data.resolved_batch_size, training=True, **shared),
        create_loader(
            val, data.eval_batch_size or data.resolved_batch_size, training=False, **shared
        ),
        train.classes,
        (len(train), len(val)),
        fingerprint(train, folder),
    )


def augmentation(
    config: AugmentConfig,
    size: int,
    interpolation: Literal["bilinear", "bicubic"] | None = None,
) -> TrainAugment:
    """The data room's description of the changes to an image.

    Raises:
        ConfigError: A value is out of range.
    """
    names = {field.name for field in dataclasses.fields(TrainAugment)}
    same = {name: value for name, value in vars(config).items() if name in names}
    return TrainAugment(size=size, interpolation=interpolation or "bilinear", **same)


def testing(
    size: int,
    crop_mode: Literal["center", "squash"] | None,
    crop_pct: float | None,
    interpolation: Literal["bilinear", "bicubic"] | None,
) -> EvalTransform:
    """The data room's description of how an image is tested.

    Raises:
        ConfigError: A value is out of range.
    """
    return EvalTransform(size, crop_mode or "center", crop_pct, interpolation or "bilinear")


def fingerprint(dataset: ImageDataset | MultiLabelDataset, folder: Path) -> str:
    """A hash of the files' places below `folder`, so of their order, and of their classes."""
    digest = hashlib.sha256()
    for path in dataset.paths:
        digest.update(Path(path).relative_to(folder).as_posix().encode() + b"\n")
    if isinstance(dataset, MultiLabelDataset):
        digest.update(dataset.targets.numpy().tobytes())
    return digest.hexdigest()[:16]
