#!/usr/bin/env python3
"""Measure the images per second of data loaders in alternating epochs, and write a record.

    python benchmarks/loaders.py --data path/to/imagenet --shards path/to/shards --workers 8

timm's loader and ours read image folders and Hugging Face datasets. torchvision's loader reads
folders. No model runs. The workers of timm and torchvision make complete images; ours decode crops
("tresnet, crops"), of which the step's device makes images ("tresnet, images"). "tresnet, device
alone" times the device with crops that are in memory. Epochs are timed, because batches arrive in
bursts.
"""

import contextlib
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from tresnet.cli import shell
from tresnet.cli.output import progress, report
from tresnet.cores import usable_cores
from tresnet.data.crops import Crops
from tresnet.data.dataset import ImageDataset
from tresnet.data.hf import saved_splits
from tresnet.data.loaders import Loader
from tresnet.data.shards import write_shards
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler, train_sampler
from tresnet.errors import InputError, needed
from tresnet.measure.records import RecordFile, check_directory
from tresnet.measure.runner import Contender, Log, Outcome, Rounds, run
from tresnet.measure.settings import RoundCount, RunSettings
from tresnet.measure.throughput import HostClock
from tresnet.settings import Augment, DataOptions, EvalTransform
from tresnet.settings.fields import Count, CountOrZero

Epoch = Iterable[tuple[Tensor | Crops, Any]]
JPEG_SIZE = (500, 375)  # the most common size of ImageNet's images
JPEGS = 64
METHOD = {
    "order": "every round visits every loader, forwards and backwards in turn",
    "timed": "from the last warm-up batch to the last batch of an epoch",
    "timm": "create_dataset and create_loader: the bytes that its workers give its prefetcher",
}


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings, DataOptions):
    """Options of the comparison; a round is one epoch of each loader."""

    rounds: RoundCount = 5
    device: str = "cpu"
    """Device that makes images of our loader's crops, such as cpu or cuda."""
    data: Path | None = None
    """Directory with train/CLASS/ or val/CLASS/ image folders; by default 64 JPEGs of 500 x 375
    pixels, cut from scikit-learn's photographs. Files are read repeatedly, so most reads come from
    the system's cache."""
    shards: Path | None = None
    """Directory of the images of --data, written by `tresnet shard` or in Parquet, which timm reads
    too. Without --data, three kinds of shards and Parquet files are written and compared."""
    split: Literal["train", "val"] = "train"
    """train: random crop and mirror image. val: resize and center crop."""
    auto_augment: str | None = None
    """Augmentation policy of timm for training, which timm's loader and ours apply."""
    batch_size: Count = 64
    """Images in a batch."""
    input_size: Count = 224
    """Side of the square image in pixels."""
    workers: CountOrZero = 2
    """Number of worker processes, at most one per core; 0 loads in the main process."""
    batches: Count = 8
    """Number of timed batches in an epoch."""
    warmup_batches: Count = 4
    """Number of batches before the timed batches of an epoch."""

    def repeated(self, dataset: Any) -> torch.utils.data.Subset[Any]:
        """Return a data set's items, repeated until they fill an epoch's batches."""
        length = self.batch_size * (self.warmup_batches + self.batches)
        return torch.utils.data.Subset(dataset, [i % len(dataset) for i in range(length)])


class Peer:
    """Loader of another project, which can be iterated until it is closed."""

    def __init__(self, loader: Any) -> None:
        self._loader: Any = loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self._loader

    def close(self) -> None:
        """Stop the workers by dropping the loader."""
        self._loader = None


def timm_loader(root: Path, settings: Settings, name: str = "") -> Peer:
    """Return timm's loader of uint8 batches, before its prefetcher converts them.

    `name` is the name of timm's reader: empty for a folder, hfds/DIR for a Hugging Face data set.
    """
    from timm.data import create_dataset, create_loader

    training = settings.split == "train"
    columns: dict[str, Any] = {}
    if name:
        columns = {"input_key": settings.image_column, "target_key": settings.label_column}
    dataset = create_dataset(
        name, root=str(root), split=settings.split, is_training=training, **columns
    )
    repeated = settings.repeated(dataset)
    loader: Any = create_loader(
        repeated,  # type: ignore[arg-type]
        settings.input_size,
        settings.batch_size,
        is_training=training,
        color_jitter=None,  # type: ignore[arg-type]  None means no jitter
        auto_augment=settings.auto_augment if training else None,
        interpolation="bilinear",
        num_workers=min(settings.workers, usable_cores()),
        crop_pct=0.875,
        device=torch.device("cpu"),
        use_prefetcher=True,
    )
    dataset.transform = repeated.transform  # type: ignore[attr-defined]  timm set it on the subset
    return Peer(loader.loader)


def torchvision_loader(root: Path, settings: Settings) -> Peer:
    """Return a loader of uint8 images with the transforms of torchvision's ImageNet training."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    size, training = settings.input_size, settings.split == "train"
    steps = [transforms.Resize(int(size / 0.875)), transforms.CenterCrop(size)]
    if training:
        steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    workers = min(settings.workers, usable_cores())
    return Peer(
        torch.utils.data.DataLoader(
            settings.repeated(ImageFolder(root / settings.split, transform)),
            settings.batch_size,
            shuffle=training,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
    )


def our_dataset(root: Path, settings: Settings) -> ImageDataset:
    """Open a folder or data set with `timm_loader`'s transforms; DataError if it has no images."""
    if settings.split == "train":
        augment = Augment(auto_augment=settings.auto_augment)
        transform = train_sampler(augment, settings.input_size)
    else:
        transform = eval_sampler(EvalTransform(input_size=settings.input_size, crop_pct=0.875))
    return open_split(str(root), settings.split, transform, multi=None, options=settings)


class OurLoader(Peer):
    """This package's loader of `our_dataset`, which yields `Crops`."""

    def __init__(self, root: Path, settings: Settings) -> None:
        """Open the data set and its loader."""
        self.device = torch.device(settings.device)
        super().__init__(
            Loader(
                settings.repeated(our_dataset(root, settings)),
                settings.batch_size,
                training=settings.split == "train",
                workers=settings.workers,
                pin_memory=self.device.type == "cuda",
            )
        )

    def close(self) -> None:
        """Stop the workers."""
        self._loader.close()


class OurImages(OurLoader):
    """This package's loader, and the device that makes images of its crops."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for crops, labels in self._loader:
            yield self.images(crops), labels

    def images(self, crops: Crops) -> Tensor:
        """Make images, and wait until they are complete."""
        images = crops.render(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return images


class DeviceAlone(OurImages):
    """The device that makes images, from an epoch of crops in memory."""

    def __init__(self, root: Path, settings: Settings) -> None:
        """Load an epoch of crops, and stop the workers."""
        super().__init__(root, settings)
        loader, self._loader = self._loader, list(self._loader)
        loader.close()

    def close(self) -> None:
        """Free the crops."""
        self._loader = []


def loaders_in(
    root: Path, shards: Mapping[str, Path], settings: Settings
) -> dict[str, Callable[[], Any]]:
    """Return functions that open the loaders to compare, by the loaders' names.

    `root` holds the splits; `shards` maps names to directories of the same images as shards.

    Raises:
        DataError: `root` or a directory of `shards` has no images of the split.
    """
    for each in (root, *shards.values()):
        our_dataset(each, settings)  # raises before anything is measured
    loaders: dict[str, Callable[[], Any]] = {
        "timm": partial(timm_loader, root, settings),
        "tresnet, crops": partial(OurLoader, root, settings),
        "tresnet, images": partial(OurImages, root, settings),
        "tresnet, device alone": partial(DeviceAlone, root, settings),
        "torchvision": partial(torchvision_loader, root, settings),
    }
    for name, path in shards.items():
        loaders[f"tresnet, crops, {name}"] = partial(OurLoader, path, settings)
        if not saved_splits(path):
            loaders[f"timm, {name}"] = partial(
                timm_loader, path / ".cache", settings, f"hfds/{path}"
            )
    return loaders


def write_jpegs(root: Path, split: str, count: int = JPEGS) -> None:
    """Write JPEGs of quality 90, cut from scikit-learn's two photographs, to `root`/`split`/{a,b}.

    Each has `JPEG_SIZE`, and half of them are mirrored. Photographs are needed, because decoding
    synthetic images takes another time.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    from PIL import Image, ImageOps

    with needed("loaders.py without --data", "digits"):
        from sklearn.datasets import load_sample_images
    sources = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    draw = np.random.default_rng(0)
    for number in range(count):
        folder = root / split / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        bleed, x, y = draw.uniform(0, (0.15, 1, 1))
        picture = ImageOps.fit(
            sources[number % 2], JPEG_SIZE, Image.Resampling.LANCZOS, bleed, (x, y)
        )
        if number % 4 > 1:
            picture = ImageOps.mirror(picture)
        picture.save(folder / f"{number:03d}.jpg", quality=90)


class LoaderContender(Contender):
    """Loader to time: an iterable of batches (images, labels) with a method `close`."""

    def __init__(self, name: str, opened: Callable[[], Epoch], settings: Settings) -> None:
        """Store the function that opens the loader."""
        self._open, self._settings = opened, settings
        self._epoch: Any = None
        self._clock = HostClock()
        self.label, self.units = name, settings.batch_size
        # batch_bytes: size of a batch's images or crops
        self.columns: dict[str, Any] = {"case": name, "batch_bytes": None}

    def set_up(self) -> None:
        """Open the loader; each visit begins with its own warm-up batches."""
        self._epoch = self._open()

    def visit(self) -> Sequence[float]:
        """Return the mean seconds of an epoch's timed batches."""
        marks = [self._clock.mark()]
        images: Tensor | Crops | None = None
        for batch in self._epoch:
            marks.append(self._clock.mark())
            images = batch[0]
        warm, size = self._settings.warmup_batches, self._settings.batch_size
        expected = warm + self._settings.batches
        if images is None or len(marks) != 1 + expected or len(images) != size:
            raise InputError(
                f"expected an epoch of {expected} batches of {size} images, got {len(marks) - 1}"
            )
        pixels = images.pixels if isinstance(images, Crops) else images
        self.columns["batch_bytes"] = pixels.nbytes
        elapsed_s = self._clock.seconds(marks[warm], marks[-1])
        return [elapsed_s / self._settings.batches]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Return the images/s of each round, with their median and range."""
        rates = [self.units / time_s for visit in rounds for time_s in visit]
        return {
            "p50_images_per_s": statistics.median(rates) if rates else None,
            "least_images_per_s": min(rates, default=None),
            "most_images_per_s": max(rates, default=None),
            "round_images_per_s": rates,
        }

    def close(self) -> None:
        """Stop the workers."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


def compare_loaders(
    loaders: Mapping[str, Callable[[], Epoch]],
    settings: Settings,
    data: str,
    argv: Sequence[str],
    log: Log,
) -> Outcome:
    """Time the `loaders`, with ratios to the first; `data` names the images in the record."""
    record = RecordFile(
        settings.output_dir,
        "bench_loader",
        device=torch.device(settings.device),
        settings={**settings.to_dict(), "data": data, "method": METHOD},
        warmup_steps=settings.warmup_batches,
        runs=settings.rounds,
        argv=argv,
    )
    group = [LoaderContender(name, opened, settings) for name, opened in loaders.items()]
    return run([group], settings, rounds=settings.rounds, log=log, record=record)


@contextlib.contextmanager
def _images(settings: Settings) -> Iterator[tuple[Path, str, dict[str, Path]]]:
    """Yield the image folder (by default a temporary one), its name, and directories of shards."""
    if settings.data is not None:
        shards = {} if settings.shards is None else {"shards": settings.shards}
        yield settings.data, settings.data.resolve().name, shards
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_jpegs(folder, settings.split)
        shards = {}
        if find_spec("datasets") is not None:
            for name, shard_settings in {
                "shards": {},
                "shards of short side 256": {"short_side": 256},
                "pixels of short side 256": {"short_side": 256, "pixels": True},
            }.items():
                shards[name] = out = folder / name
                images = open_split(folder, settings.split)
                write_shards({settings.split: images}, out, **shard_settings)
            rows = import_module("datasets").load_from_disk(folder / "shards")[settings.split]
            shards["Parquet"] = folder / "Parquet"
            rows.to_parquet(folder / "Parquet" / f"{settings.split}.parquet")
        yield folder, f"{JPEGS} photographs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}, JPEG", shards


def main(settings: Settings) -> int:
    """Time the loaders, print the table and write the record."""
    settings.check()
    check_directory(settings.output_dir)  # before images are written
    with _images(settings) as (folder, data, shards):
        loaders = loaders_in(folder, shards, settings)
        outcome = compare_loaders(loaders, settings, data, sys.argv, progress)
    columns = [
        ("batch bytes", "batch_bytes", ""),
        ("p50 img/s", "p50_images_per_s", ".1f"),
        ("x first", "ratio_to_first", ".3f"),
        ("slowest", "least_images_per_s", ".1f"),
        ("fastest", "most_images_per_s", ".1f"),
    ]
    return report(outcome, columns)


if __name__ == "__main__":
    sys.exit(shell.run(lambda: main(tyro.cli(Settings, description=__doc__))))
