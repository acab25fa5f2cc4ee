"""The loaders that `tresnet bench loader` compares, and images to load where there are none."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tresnet.data.folder import open_folder
from tresnet.data.loaders import Loader, create_loader, usable_cores
from tresnet.data.transforms import EvalTransform, TrainAugment, eval_transform, train_transform
from tresnet.errors import MissingDependencyError

Split = Literal["train", "val"]
# The most common size of ImageNet's images.
JPEG_SIZE = (500, 375)
JPEGS = 64


class Repeated(torch.utils.data.Dataset[tuple[Any, Any]]):
    """A data set as long as wanted: its items over and over, or the first of them."""

    def __init__(self, dataset: Any, length: int) -> None:
        """Keep the data set.

        Args:
            dataset: of (image, label), with an attribute `transform`.
            length: how many items this one has.
        """
        self._dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The item, or one that comes round again."""
        return self._dataset[index % len(self._dataset)]

    @property
    def transform(self) -> Any:
        """The data set's, which timm's `create_loader` sets."""
        return self._dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._dataset.transform = transform


class _Closing:
    """Iterates over a loader until it is closed."""

    def __init__(self, loader: Any) -> None:
        self._loader: Any = loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self._loader

    def close(self) -> None:
        """Stop the workers; it cannot be iterated again."""
        self._loader = None


class TimmLoader(_Closing):
    """timm's loader: random crop and mirror image, or resize and center crop.

    It gives bytes, as its workers hand them to its prefetcher for a GPU, or floats without one, for
    which its API has no way to leave the normalisation out: it is by mean 0 and deviation 1.
    """

    def __init__(
        self,
        root: Path,
        split: Split,
        dtype: torch.dtype,
        *,
        length: int,
        batch_size: int,
        size: int,
        workers: int,
    ) -> None:
        """Open the folder; the workers start with the first iteration.

        Args:
            root: folder that holds the splits.
            split: which one; `train` is augmented.
            dtype: torch.uint8 or torch.float32.
            length: images of an epoch.
            batch_size: images in a batch.
            size: height and width in pixels.
            workers: processes that load, at most one a core.
        """
        from timm.data import create_dataset
        from timm.data import create_loader as create

        training = split == "train"
        dataset = create_dataset("", root=str(root), split=split, is_training=training)
        loader: Any = create(
            Repeated(dataset, length),  # type: ignore[arg-type]
            size,
            batch_size,
            is_training=training,
            color_jitter=None,  # type: ignore[arg-type]  timm's way to leave it out
            interpolation="bilinear",
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            num_workers=min(workers, usable_cores()),
            crop_pct=0.875,
            device=torch.device("cpu"),
            use_prefetcher=dtype == torch.uint8,
        )
        super().__init__(loader.loader if dtype == torch.uint8 else loader)


def torchvision_loader(
    root: Path, split: Split, *, length: int, batch_size: int, size: int, workers: int
) -> Any:
    """As torchvision trains on ImageNet, giving bytes: its ImageFolder and transforms."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    if split == "val":
        steps = [transforms.Resize(int(size / 0.875)), transforms.CenterCrop(size)]
    folder = ImageFolder(root / split, transforms.Compose([*steps, transforms.PILToTensor()]))
    return _Closing(
        torch.utils.data.DataLoader(
            Repeated(folder, length),
            batch_size,
            shuffle=split == "train",
            num_workers=(workers := min(workers, usable_cores())),
            persistent_workers=workers > 0,
        )
    )


def our_loader(
    root: Path,
    split: Split,
    dtype: torch.dtype,
    *,
    length: int,
    batch_size: int,
    size: int,
    workers: int,
) -> Loader:
    """Ours with the transforms of `TimmLoader`, giving bytes or floats.

    Raises:
        DataError: there are no images at `root`/`split`.
    """
    training = split == "train"
    if training:
        plain = TrainAugment(size=size, auto_augment=None, cutout_prob=0.0)
        transform = train_transform(plain, dtype=dtype)
    else:
        transform = eval_transform(EvalTransform(size=size), dtype=dtype)
    dataset = Repeated(open_folder(root, split, transform), length)
    return create_loader(dataset, batch_size, training=training, workers=workers)


def loaders_in(root: Path, split: Split, **shared: int) -> dict[str, Callable[[], Any]]:
    """What opens each of the loaders that are compared; `shared` is what `TimmLoader` takes.

    Raises:
        DataError: there are no images at `root`/`split`.
    """
    our_loader(root, split, torch.uint8, **shared).close()  # complain before anything is measured
    return {
        "tresnet, uint8": lambda: our_loader(root, split, torch.uint8, **shared),
        "tresnet, float": lambda: our_loader(root, split, torch.float32, **shared),
        "timm, uint8": lambda: TimmLoader(root, split, torch.uint8, **shared),
        "timm, float": lambda: TimmLoader(root, split, torch.float32, **shared),
        "torchvision, uint8": lambda: torchvision_loader(root, split, **shared),
    }


def write_jpegs(root: Path, split: Split, count: int = JPEGS) -> None:
    """Write `root`/`split`/{a,b}/N.jpg: parts of scikit-learn's two photographs, of quality 90.

    Each is `JPEG_SIZE`; half of them are mirrored. Made-up pictures would take longer or shorter to
    decode.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    from PIL import Image, ImageOps

    sources = [Image.fromarray(pixels) for pixels in _photographs()]
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


def _photographs() -> list[Any]:
    try:
        from sklearn.datasets import load_sample_images
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "photographs to load come with scikit-learn: pip install scikit-learn, or give --data"
        ) from error
    return load_sample_images().images
