"""The loaders that `tresnet bench loader` compares, and images to load where there are none."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch

from tresnet.data.folder import open_folder
from tresnet.data.loaders import create_loader, usable_cores
from tresnet.data.seeding import preserved_generators, seed_cpu_generators
from tresnet.data.shards import ShardDataset, manifest_path
from tresnet.data.transforms import Augment, eval_transform, train_transform
from tresnet.errors import needed
from tresnet.settings import EvalTransform

logger = logging.getLogger(__name__)
Split = Literal["train", "val"]
# The most common size of ImageNet's images.
JPEG_SIZE = (500, 375)
JPEGS = 64


@dataclass(frozen=True)
class Epoch:
    """What each loader is to load.

    Attributes:
        root: folder that holds the splits.
        split: which one; `train` is cropped and mirrored at random, `val` resized and cropped.
        length: images of an epoch, those of the folder over and over.
        batch_size: images in a batch.
        size: height and width in pixels.
        workers: processes that load, at most one a core.
    """

    root: Path
    split: Split
    length: int
    batch_size: int
    size: int
    workers: int

    def of(self, dataset: Any) -> torch.utils.data.Subset[Any]:
        """A data set's items until there are enough."""
        indices = [index % len(dataset) for index in range(self.length)]
        return torch.utils.data.Subset(dataset, indices)


class Peer:
    """Another project's loader, until it is closed."""

    def __init__(self, loader: Any) -> None:
        self._loader: Any = loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self._loader

    def close(self) -> None:
        """Stop the workers; it cannot be iterated again."""
        self._loader = None


def timm_loader(epoch: Epoch, dtype: torch.dtype) -> Peer:
    """timm's, giving bytes, as its workers hand them to its prefetcher for a GPU, or floats.

    For floats its API has no way to leave the normalisation out: it is by mean 0 and deviation 1.
    """
    from timm.data import create_dataset, create_loader

    training = epoch.split == "train"
    dataset = create_dataset("", root=str(epoch.root), split=epoch.split, is_training=training)
    repeated = epoch.of(dataset)
    loader: Any = create_loader(
        repeated,  # type: ignore[arg-type]
        epoch.size,
        epoch.batch_size,
        is_training=training,
        color_jitter=None,  # type: ignore[arg-type]  timm's way to leave it out
        interpolation="bilinear",
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        num_workers=min(epoch.workers, usable_cores()),
        crop_pct=0.875,
        device=torch.device("cpu"),
        use_prefetcher=dtype == torch.uint8,
    )
    dataset.transform = repeated.transform  # type: ignore[attr-defined]  where timm has put it
    return Peer(loader.loader if dtype == torch.uint8 else loader)


def torchvision_loader(epoch: Epoch) -> Peer:
    """As torchvision trains on ImageNet, giving bytes: its ImageFolder and transforms."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    size, training = epoch.size, epoch.split == "train"
    steps = [transforms.Resize(int(size / 0.875)), transforms.CenterCrop(size)]
    if training:
        steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    workers = min(epoch.workers, usable_cores())
    return Peer(
        torch.utils.data.DataLoader(
            epoch.of(ImageFolder(epoch.root / epoch.split, transform)),
            epoch.batch_size,
            shuffle=training,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
    )


class DaliLoader(Peer):
    """DALI's on the CPU, with as many threads as others have processes, giving bytes."""

    def __init__(self, epoch: Epoch) -> None:
        """Build its pipeline."""
        from nvidia.dali import fn, pipeline_def, types  # type: ignore[import-not-found]

        size, training = epoch.size, epoch.split == "train"
        linear = {"interp_type": types.INTERP_LINEAR, "antialias": True}

        def steps() -> tuple[Any, Any]:
            folder = str(epoch.root / epoch.split)
            data, labels = fn.readers.file(file_root=folder, random_shuffle=training)
            if not training:
                images = fn.resize(
                    fn.decoders.image(data), resize_shorter=int(size / 0.875), **linear
                )
                return fn.crop(images, crop=(size, size)), labels
            images = fn.decoders.image_random_crop(
                data, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
            )
            images = fn.resize(images, resize_x=size, resize_y=size, **linear)
            return fn.flip(images, horizontal=fn.random.coin_flip()), labels

        threads = max(1, min(epoch.workers, usable_cores()))
        made = pipeline_def(batch_size=epoch.batch_size, num_threads=threads, device_id=None)
        super().__init__(made(steps)())
        self._batches = epoch.length // epoch.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self._batches):
            images, labels = (torch.from_numpy(found.as_array()) for found in self._loader.run())
            yield images.permute(0, 3, 1, 2), labels[:, 0]


class OurLoader(Peer):
    """Ours with the transforms of `timm_loader`, giving bytes or floats, of a folder or of shards.

    Raises:
        DataError: there are no images.
    """

    def __init__(self, epoch: Epoch, dtype: torch.dtype) -> None:
        """Open the data set and its loader."""
        training = epoch.split == "train"
        if training:
            transform = train_transform(Augment(), epoch.size, dtype=dtype)
        else:
            transform = eval_transform(
                EvalTransform(input_size=epoch.size, crop_pct=0.875), dtype=dtype
            )
        in_shards = manifest_path(epoch.root, epoch.split).is_file()
        opener = ShardDataset if in_shards else open_folder
        self._dataset = opener(epoch.root, epoch.split, transform)
        self._staged = training and dtype == torch.uint8
        super().__init__(
            create_loader(
                epoch.of(self._dataset),
                epoch.batch_size,
                training=training,
                workers=epoch.workers,
            )
        )

    def close(self) -> None:
        """Stop the workers."""
        self._loader.close()

    def stages(self) -> dict[str, float]:
        """Seconds that this process takes for an image, by what it does; of training bytes alone.

        The transform is taken apart here, as `ImageDataset` and `train_transform` put it together.
        """
        if not self._staged:
            return {}
        spent: defaultdict[str, float] = defaultdict(float)
        crop = self._dataset.transform.transforms[0]  # type: ignore[union-attr]

        def timed(stage: str, done: Callable[..., Any], *arguments: Any) -> Any:
            begin_s = perf_counter()
            result = done(*arguments)
            spent[stage] += (perf_counter() - begin_s) / len(self._dataset)
            return result

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as torch does in workers
        with preserved_generators():
            for index in range(len(self._dataset)):
                timed("augment", seed_cpu_generators, index)
                picture = timed("read", self._dataset.picture, index)
                box, mirror = timed("augment", crop.draw, *picture.size)
                part = timed("resize", crop.resize, timed("decode", picture.crop, box))
                if mirror:
                    timed("augment", part.flip, 1)
        torch.set_num_threads(threads)
        return dict(spent)


def loaders_in(
    root: Path, split: Split, shards: Mapping[str, Path], **shared: int
) -> dict[str, Callable[[], Any]]:
    """What opens each of the loaders that are compared.

    Args:
        root: folder that holds the splits.
        split: which one.
        shards: folders of shards of the same images, by what to call them.
        **shared: the other fields of `Epoch`.

    Raises:
        DataError: there are no images at `root`/`split`, or no such shards.
    """
    epoch = Epoch(root, split, **shared)
    sharded = {name: replace(epoch, root=place) for name, place in shards.items()}
    for each in (epoch, *sharded.values()):
        OurLoader(each, torch.uint8).close()  # complain before anything is measured
    loaders: dict[str, Callable[[], Any]] = {
        "tresnet, uint8": lambda: OurLoader(epoch, torch.uint8),
        "tresnet, float": lambda: OurLoader(epoch, torch.float32),
        "timm, uint8": lambda: timm_loader(epoch, torch.uint8),
        "timm, float": lambda: timm_loader(epoch, torch.float32),
        "torchvision, uint8": lambda: torchvision_loader(epoch),
    }
    try:
        version = import_module("nvidia.dali").__version__
        loaders[f"DALI {version} on the CPU, uint8"] = lambda: DaliLoader(epoch)
    except ImportError as error:
        if error.name not in ("nvidia", "nvidia.dali"):
            logger.warning("DALI is left out, its import failed: %s", error)
    for name, each in sharded.items():
        loaders[f"tresnet, uint8, {name}"] = partial(OurLoader, each, torch.uint8)
    return loaders


def write_jpegs(root: Path, split: Split, count: int = JPEGS) -> None:
    """Write `root`/`split`/{a,b}/N.jpg: parts of scikit-learn's two photographs, of quality 90.

    Each is `JPEG_SIZE`; half of them are mirrored. Made-up pictures would take longer or shorter to
    decode.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    from PIL import Image, ImageOps

    with needed("bench loader without --data", "demo"):
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
