"""Open a run's data set and hash it."""

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tresnet.data import digits
from tresnet.data.channels import ImageReader, Moments, measure
from tresnet.data.dataset import ImageDataset, Paths
from tresnet.data.labels import CLASSES_FILE
from tresnet.data.loaders import Loader
from tresnet.data.sources import fetch, open_split
from tresnet.data.splitting import in_both
from tresnet.data.transforms import eval_sampler, train_sampler
from tresnet.engine.config import BALANCED, BUILT_IN, Filled, ImageConfig, Resolved
from tresnet.engine.distributed import Processes
from tresnet.engine.state import Identity
from tresnet.errors import ConfigError, DataError, listed
from tresnet.models.tresnet import TResNet
from tresnet.ops.render import runs_kernels
from tresnet.settings import Sides

logger = logging.getLogger(__name__)

_LAYOUT = (".json", ".safetensors", ".bin")  # files of a model's directory in timm's layout


@dataclasses.dataclass(frozen=True)
class Splits:
    """Training and validation images, and hashes that identify the data."""

    train: ImageDataset
    val: ImageDataset
    source: str  # folder or hub name
    fingerprints: dict[str, str]  # keys "train" and "val"; "beside" for files that options name

    @property
    def classes(self) -> list[str]:
        return self.train.classes

    def identity(self, began: int) -> Identity:
        """Return the identity of the data in a run that began with `began` processes."""
        return Identity(began, **self.fingerprints, classes=tuple(self.classes))

    def hashed(self, config: Filled, processes: Processes) -> Self:
        """Return the splits with fingerprints of their labels in this order (a collective)."""
        fingerprints = processes.is_main and {  # other processes need not read every file's size
            "train": fingerprint(self.train, self.source),
            "val": fingerprint(self.val, self.source),
            "beside": fingerprint_option_files(config),
        }
        return dataclasses.replace(self, fingerprints=processes.from_main(fingerprints))

    def arranged(self, classes: Sequence[str]) -> Self:
        """Return the splits with labels that are indices into `classes`, the same in any order."""
        train, val = (
            dataclasses.replace(split, labels=split.labels.arranged(classes))
            for split in (self.train, self.val)
        )
        return dataclasses.replace(self, train=train, val=val)


def locate(data: ImageConfig, processes: Processes) -> str:
    """Return the data set's folder or hub name; write or download data if needed (a collective)."""
    assert data.data is not None, "checked by validate"
    if data.data not in BUILT_IN:
        return fetch(data.data)
    if processes.is_main:
        digits.write(data.data_root, data.data)
    processes.from_main(None)
    return str(Path(data.data_root) / data.data)


def open_splits(config: Filled, processes: Processes) -> Splits:
    """Open the training and validation splits (a collective), or raise DataError."""
    data = config.data
    source = locate(data, processes)
    options = {"multi": config.labels.multi, "reader": ImageReader(config.in_chans)}
    samplers = _train_sampler(config, data.sizes[0]), eval_sampler(data)
    train = open_images(data, source, data.train_split, samplers[0], **options)
    val = open_images(data, source, data.val_split, samplers[1], **options, like=train.labels)
    if processes.is_main:
        _warn_of_images_in_both(train, val)
    val = _with_classes_of(train, val)
    if processes.is_main and not val.multi and not (counts := val.labels.counts).all():
        shown = listed(np.array(val.classes)[counts == 0].tolist(), 10)
        logger.warning("%s lacks images of %s: its scores leave these out", val.split, shown)
    return Splits(train, val, source, {}).hashed(config, processes)


def _train_sampler(config: Filled, size: Sides) -> Any:
    return train_sampler(config.augment, size, config.data.interpolation, config.in_chans)


def set_statistics(model: TResNet, splits: Splits, processes: Processes) -> None:
    """For other than three channels, let both splits have the type of pixels of the weights.

    New weights get the type, mean and deviation of the images to train on, which all processes
    measure together. DataError: an image is unreadable, or images have different types.
    """
    cfg, train = model.pretrained_cfg, splits.train
    if model.in_chans == 3:
        return
    if "pixel_dtype" not in cfg:
        processes.console.say(
            f"measuring mean and deviation of {model.in_chans} channels of {len(train)} images"
        )
        own = measure(train, range(processes.rank, len(train), processes.world_size))
        total, dtypes = Moments(), dict[str, str]()
        for moments, found in processes.gather(own):
            total, dtypes = total + moments, found | dtypes
        if len(dtypes) != 1:
            got = (f"{dtype}, such as {path}" for dtype, path in sorted(dtypes.items()))
            raise DataError(
                f"expected pixels of one type in {train.split}, got {'; '.join(got) or 'no image'}:"
                " convert the files to one type"
            )
        cfg |= {"pixel_dtype": next(iter(dtypes)), **total.statistics}
    train.reader = splits.val.reader = dataclasses.replace(train.reader, dtype=cfg["pixel_dtype"])
    if not splits.val.skip_bad_images:
        splits.val.encoded_image(0)  # before the first epoch, if its type is another one


def _warn_of_images_in_both(train: ImageDataset, val: ImageDataset) -> None:
    if isinstance(train.images, Paths) and isinstance(val.images, Paths):
        both = in_both(train.images, val.images)
        if both:
            logger.warning(
                "%d images of %s or more are in %s too, such as %s as %s: take them out of one, "
                "because they make accuracies too high",
                *(len(both), val.split, train.split, *both[0]),
            )


def _with_classes_of(train: ImageDataset, val: ImageDataset) -> ImageDataset:
    """Return `val` with the classes of `train`, in their order; with one label it may lack some.

    DataError is raised for other classes, and if images with one label have one class.
    """
    what, advice = "class folders", "add the missing folders or delete the others"
    if not train.paths:
        what, advice = "classes", "give both label columns one type ClassLabel"
    elif train.multi:
        what, advice = "classes", f"list all of them in {CLASSES_FILE}"
    if len(train.classes) < 2 and not train.multi:
        raise DataError(
            f"expected at least two {what} in train and val, got {train.classes[0]}: add another"
        )
    if train.classes == val.classes:
        return val
    lacking = sorted(set(train.classes) - set(val.classes))
    if (extra := sorted(set(val.classes) - set(train.classes))) or (lacking and train.multi):
        only = [
            f"only in {split}: {listed(names, 10)}"
            for split, names in (("train", lacking), ("val", extra))
            if names
        ]
        raise DataError(
            f"expected the same {what} in train and val, got {'; '.join(only)}: {advice}"
        )
    return dataclasses.replace(val, labels=val.labels.arranged(train.classes))


def open_images(
    data: ImageConfig, source: str, split: str, transform: Any, **options: Any
) -> ImageDataset:
    """Open a split at `source` with the options of `data` and those of `open_split`."""
    own = {"skip_bad_images": data.skip_bad_images, "options": data, "workers": data.workers}
    return open_split(source, split, transform, **own, **options)


def set_training_size(config: Resolved, splits: Splits, epoch: int) -> bool:
    """Set the image size of `epoch`, which counts from 0; return False if the run has one size."""
    sizes = config.data.sizes
    if len(sizes) == 1:
        return False
    size = sizes[epoch * len(sizes) // config.schedule.epochs]
    splits.train.transform = _train_sampler(config, size)
    return True


def open_loader(
    data: ImageConfig, dataset: ImageDataset, batch_size: int, processes: Processes, **options: Any
) -> Loader:
    """Create this process's loader of a split; `options` are arguments of `Loader`."""
    on_gpu = processes.device.type == "cuda"
    return Loader(
        dataset,
        batch_size,
        workers=data.workers,
        distributed=(processes.rank, processes.world_size),
        pin_memory=on_gpu,
        render=on_gpu and not runs_kernels(processes.device),
        **options,
    )


def open_loaders(
    config: Resolved,
    splits: Splits,
    batch_size: int,
    processes: Processes,
    stack: contextlib.ExitStack,
) -> tuple[Loader, Loader]:
    """Create this process's loaders for training and validation, which `stack` closes."""
    order: dict[str, Any] = {"repeats": config.augment.aug_repeats, "seed": config.run.seed}
    order["weights"] = draw_weights(config.data.sampler, splits.train)
    common = batch_size, processes
    train = open_loader(config.data, splits.train, *common, training=True, **order)
    val = open_loader(config.data, splits.val, *common, training=False)
    stack.callback(train.close)
    stack.callback(val.close)
    return train, val


def draw_weights(sampler: str, train: ImageDataset) -> np.ndarray | None:
    """Return the weight of each image by --sampler, or None if an epoch has each image once.

    ConfigError: a class has no image, so that it cannot be drawn as often as the others.
    """
    if sampler != BALANCED:
        return None
    missing = [name for name, n in zip(train.classes, train.labels.counts, strict=True) if not n]
    if missing and not train.multi:
        raise ConfigError(
            f"--sampler {BALANCED}: expected images of each class in {train.split}, got none for"
            f" {listed(missing, 5)}: add images, or take out these classes"
        )
    return train.labels.rarities


def fingerprint(dataset: ImageDataset, folder: str) -> str:
    """Return a hash of the image files' order, sizes, labels, and paths relative to `folder`."""
    digest = hashlib.sha256((dataset.digest or "").encode())
    if isinstance(files := dataset.images, Paths):
        for path, size in zip(files, files.sizes.tolist(), strict=True):
            digest.update(os.fsencode(os.path.relpath(path, folder)))
            digest.update(b"\n?\n" if size < 0 else b"\n%d\n" % size)
    for targets in dataset.labels.targets():
        digest.update(targets.tobytes())
    return digest.hexdigest()[:16]


def fingerprint_option_files(config: Filled) -> str:
    """Return a hash of the files that --hierarchy, --class-weights and --teacher name."""
    digest, weights = hashlib.sha256(), config.labels.class_weights
    weights = None if weights == BALANCED else weights
    for name in (config.labels.hierarchy, weights, config.distill.teacher):
        path = Path((name or "").removeprefix("local-dir:"))
        files = [path]
        if name and path.is_dir():  # a model's directory in timm's layout
            files = [file for file in sorted(path.iterdir()) if file.suffix in _LAYOUT]
        for file in filter(Path.is_file, files):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
