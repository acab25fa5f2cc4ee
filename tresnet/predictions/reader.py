"""Read images on threads, run a model on batches of them, and leave out what has no outputs."""

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tresnet.cores import usable_cores
from tresnet.data.channels import RGB, ImageReader
from tresnet.data.decoding import BadImageError, EncodedImage, as_bad_image_error
from tresnet.errors import OutputError
from tresnet.predictions.pictures import Picture, Source, pictures
from tresnet.settings import Compute
from tresnet.steps.outputs import finite, not_finite

Bad = Callable[[BadImageError | OutputError], object]


class ImageModel(NamedTuple):
    """A model, and the preparation of its images."""

    run: Callable[[Tensor], Tensor]  # maps uint8 (N, 3, H, W) to outputs (N, outputs)
    transform: Callable[[Picture], Tensor]  # maps an image to uint8 (3, H, W)
    reader: ImageReader = RGB  # images of other channels become float32 (channels, H, W)
    compute: Compute | None = None  # settings of the inference step; None for an exported file


def raise_error(error: BadImageError | OutputError) -> NoReturn:
    """Raise the error of an image: the default of functions that take `bad`."""
    raise error


def outputs(
    images: Source | Iterable[Source], model: ImageModel, batch_size: int, bad: Bad
) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """Yield names, pixels (N, 3, H, W) and finite outputs (N, outputs) of batches, on the CPU.

    `bad` receives the error of an image that cannot be read, and of outputs that are not finite.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _read(images, model, 2 * batch_size):
            try:
                yield name, tensor.result()
            except BadImageError as error:
                bad(error)

    rest = tensors()
    while some := list(itertools.islice(rest, batch_size)):
        names, batch = [name for name, _ in some], torch.stack([pixels for _, pixels in some])
        values = model.run(batch).float().cpu()
        good = finite(values)
        if not good.all():
            bad(not_finite(len(good) - int(good.sum()), len(good), model.compute))
            names = list(itertools.compress(names, good.tolist()))
            batch, values = batch[good], values[good]
        if names:
            yield names, batch, values


def _read(
    images: Source | Iterable[Source], model: ImageModel, ahead: int
) -> Iterator[tuple[str, Future[Tensor]]]:
    """Yield the name and the tensor of each image, while threads read up to `ahead` more."""

    def transformed(name: str, read: Callable[[], Picture]) -> Tensor:
        with as_bad_image_error(name, MemoryError):
            image = read()
            if isinstance(image, EncodedImage) and model.reader.rgb:
                image = image.rgb()  # its crops share nvImageCodec's decoder, which threads may not
            return model.transform(image)

    waiting: collections.deque[tuple[str, Future[Tensor]]] = collections.deque()
    pool = _threads(os.getpid())
    for name, read in pictures(images, model.reader):
        waiting.append((name, pool.submit(transformed, name, read)))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that read images. A forked process has none of them and makes its own."""
    return ThreadPoolExecutor(usable_cores())
