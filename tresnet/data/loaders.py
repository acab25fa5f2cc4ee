"""Load batches whose order and augmentation depend only on (seed, epoch), not on the workers.

`EpochBatches` lists the images and seeds of each batch. A resumed run can therefore continue inside
an epoch. torch's DataLoader runs the workers. Forked workers write to shared memory (`_Batches`).
"""

import dataclasses
import logging
import math
import mmap
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator, Sized
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from tresnet.data.pictures import BadImageError
from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.errors import ConfigError, DataError
from tresnet.files import STOPPING

logger = logging.getLogger(__name__)

_REPLACEMENT_TRIES = 16
_AHEAD = 2  # batches that a worker prepares in advance
_TURNS = _AHEAD + 1  # batches of a worker in shared memory (see `_Batches`)

Key = tuple[int, int | None]  # an image's index and augmentation seed (None in evaluation)
Batch = tuple[torch.Tensor, torch.Tensor]


class SizedDataset(Protocol):
    """Data set of images with labels. The label of a multi-label image is a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


class EpochBatches(torch.utils.data.Sampler[list[Key]]):
    """Sampler of one rank's batches, as lists of keys. In training, (seed, epoch) decides the keys.

    Training shuffles the images and distributes them over ranks like torch's DistributedSampler.
    The images that all ranks together show in batch b depend on the sum of the ranks' batch sizes,
    but not on the number of ranks. The shuffled order has each image `repeats` times in a row.
    As `repeats` does not change the number of batches, an epoch shows 1 / `repeats` of the images.
    Evaluation keeps the data set's order, does not pad, and gives each image to exactly one rank.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        training: bool,
        seed: int,
        distributed: tuple[int, int],
        repeats: int = 1,
    ) -> None:
        rank, world_size = distributed
        self._images = len(dataset)
        self._own = range(rank, len(dataset), world_size)  # this rank's positions in an epoch
        self.training = training
        self._seed = seed
        self._repeats = repeats
        self.batch_size = batch_size
        self._epoch = self._start_batch = 0
        count = len(dataset) // world_size if training else len(self._own)
        full, rest = divmod(count, batch_size)
        self._batches = full if training else full + bool(rest)

    def set_epoch(self, epoch: int, start_batch: int) -> None:
        """Set the epoch to iterate over, and the index of the first batch to yield."""
        if not 0 <= start_batch <= self._batches:
            raise ConfigError(
                f"expected start_batch from 0 to {self._batches}, the batches of an epoch, got "
                f"{start_batch}: were the data, the batch size or the number of ranks changed?"
            )
        self._epoch, self._start_batch = epoch, start_batch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[Key]]:
        order: Any = range(self._images)
        if self.training:
            generator = torch.Generator().manual_seed(mix_seed(self._seed) + self._epoch)
            order = torch.randperm(self._images, generator=generator).numpy()
        for batch in range(self._start_batch, self._batches):
            begin = batch * self.batch_size
            own = self._own[begin : begin + self.batch_size]
            places = [divmod(place, self._repeats) for place in own]
            yield [self.key(int(order[place]), copy) for place, copy in places]

    def key(self, index: int, copy: int = 0) -> Key:
        """Return the key of copy `copy` of an image. In training, each copy has its own seed."""
        parts = (self._seed, self._epoch, index, copy)[: 4 if copy else 3]
        return index, mix_seed(*parts) if self.training else None


class Loader:
    """Iterates over the batches of one epoch: images (N, C, H, W) and labels (N,), int64.

    Multi-label data have labels (N, classes), float32. An unreadable image raises DataError, unless
    the data set has `skip_bad_images`. With `skip_bad_images`, training shows another image
    instead, and evaluation makes the batch smaller. `skipped` maps the paths of this rank's
    unreadable images to reasons. Worker processes run from the first iteration until `close`.
    """

    def __init__(
        self, dataset: SizedDataset, batches: EpochBatches, workers: int, pin_memory: bool
    ) -> None:
        self._skips = bool(getattr(dataset, "skip_bad_images", False))
        self._source = _Batches(dataset, self._skips and batches.training)
        self._sampler, self._workers, self._pin_memory = batches, workers, pin_memory
        self._loader: DataLoader[Any] | None = None
        self.skipped: dict[str, str] = {}

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch and its first batch; raise ConfigError if there is no such batch."""
        self._sampler.set_epoch(epoch, start_batch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if self._loader is None:
            self._loader = self._start()
        for found in _iterator(self._loader):
            try:
                self._account(found)
            except DataError:
                self.close()
                raise
            if found.count:
                yield found.tensors()

    def close(self) -> None:
        """Stop the workers now. The garbage collector would need 5 s to stop each of them."""
        self._loader = None

    def _start(self) -> DataLoader[Any]:
        batches, workers = self._sampler, self._workers
        if workers and multiprocessing.get_start_method() == "fork" and len(batches):
            self._source.share_memory(workers, batches.batch_size, batches.key(0))
        return DataLoader(
            self._source,
            batch_sampler=batches,  # type: ignore[arg-type]  lists of keys
            num_workers=workers,
            collate_fn=torch.nn.Identity(),  # the data set returns whole batches
            pin_memory=self._pin_memory,
            worker_init_fn=_start_worker,
            prefetch_factor=_AHEAD if workers else None,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # otherwise DataLoader draws from the global generator
        )

    def _account(self, found: "_Found") -> None:
        for failure in found.failures:
            if not self._skips:
                raise failure.unskipped()
            if failure.path not in self.skipped:
                self.skipped[failure.path] = failure.reason
                logger.warning("skipped %s: %s", failure.path, failure.reason)
        if self._sampler.training and found.count < self._sampler.batch_size:
            raise DataError(
                f"{_REPLACEMENT_TRIES} images in a row cannot be read, the last is "
                f"{found.failures[-1].path}: repair the data set"
            )


# Memory that forked workers write batches to, by `id`; each lives as long as its DataLoader.
_shared: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class _Found:
    """Batch that `_Batches` has read. `images` is None if no image of the batch is readable.

    Workers send arrays: for tensors, torch would open a socket below TMPDIR, whose path may be too
    long. Images in shared memory are a tuple of the key in `_shared`, the worker and the turn.
    If `innermost`, each image is (H, W, C).
    """

    count: int
    images: np.ndarray | torch.Tensor | tuple[int, int, int] | None
    labels: Any
    failures: list[BadImageError]
    innermost: bool = False

    def tensors(self, copy: bool = True) -> Batch:
        """Return images (N, C, H, W), copied out of shared memory unless not `copy`, and labels."""
        images = self.images
        if isinstance(images, tuple):
            key, *place = images
            images = _shared[key][*place, : self.count]
            images = images.copy() if copy else images  # faster than by torch: larger pages
        images = torch.as_tensor(images)
        images = images.permute(0, 3, 1, 2) if self.innermost else images
        return images, torch.as_tensor(self.labels)

    def pin_memory(self, device: Any = None) -> "_Found":
        """Copy the batch to pinned memory; torch calls this in a thread of the main process."""
        if not self.count:
            return self
        images, labels = (tensor.pin_memory() for tensor in self.tensors(copy=False))
        return dataclasses.replace(self, images=images, labels=labels, innermost=False)


class _Batches(Dataset[Any]):
    """Data set of `_Found`s. They carry errors, because torch turns raised errors into text.

    Forked workers copy images into shared memory: to fill new memory for each batch takes longer
    than to copy the pixels. A worker writes to `_TURNS` places in turn. It prepares at most
    `_AHEAD` batches that the main process has not received, and the main process copies each.
    """

    def __init__(self, dataset: SizedDataset, replace: bool) -> None:
        self._dataset = dataset
        self._replace = replace
        self._memory: np.ndarray | None = None
        self._turn = 0

    def share_memory(self, workers: int, batch_size: int, key: Key) -> None:
        """Allocate memory for images like that of `key`, unless it is no readable tensor."""
        with preserved_generators():
            sample = self._sample(*key, [])
        if sample is not None and isinstance(sample[0], torch.Tensor):
            like = _in_memory_order(sample[0]).numpy()
            shape = (workers, _TURNS, batch_size, *like.shape)
            memory = mmap.mmap(-1, math.prod(shape) * like.itemsize)
            self._memory = np.ndarray(shape, like.dtype, memory)
            _shared[id(self._memory)] = self._memory

    def __getitems__(self, keys: list[Key]) -> _Found:
        """Read a batch; copy each image to shared memory while it is in the CPU's cache."""
        failures: list[BadImageError] = []
        images: list[Any] = []
        labels: list[Any] = []
        innermost, worker = False, get_worker_info()
        place = room = None
        if worker is not None and self._memory is not None:
            self._turn = (self._turn + 1) % _TURNS
            place = (id(self._memory), worker.id, self._turn)
            room = torch.from_numpy(self._memory[worker.id, self._turn])
        with preserved_generators() if worker is None else nullcontext():
            for key in keys:
                if (item := self._sample(*key, failures)) is not None:
                    image = _in_memory_order(item[0])
                    innermost = image is not item[0]
                    images.append(image if room is None else room[len(images)].copy_(image))
                    labels.append(item[1])
        if not images:
            return _Found(0, None, None, failures)
        found = place or default_collate(images).numpy()
        marks = default_collate(labels).numpy()
        return _Found(len(images), found, marks, failures, innermost)

    def _sample(
        self, index: int, seed: int | None, failures: list[BadImageError]
    ) -> tuple[Any, Any] | None:
        for attempt in range(_REPLACEMENT_TRIES):
            if seed is not None:
                seed_cpu_generators(seed)
            try:
                return self._dataset[index]
            except BadImageError as error:
                failures.append(BadImageError(error.path, error.reason))  # this drops the traceback
            if seed is None or not self._replace:
                break
            index = mix_seed(seed, attempt) % len(self._dataset)
        return None


def _in_memory_order(image: Any) -> Any:
    """Permute a (C, H, W) tensor to (H, W, C) if it is not contiguous; change nothing else."""
    if not isinstance(image, torch.Tensor) or image.dim() != 3 or image.is_contiguous():
        return image
    return image.permute(1, 2, 0)


def create_loader(
    dataset: SizedDataset,
    batch_size: int,
    *,
    training: bool,
    workers: int = 0,
    seed: int = 0,
    distributed: tuple[int, int] = (0, 1),
    pin_memory: bool = False,
    repeats: int = 1,
) -> Loader:
    """Make the loader of one rank; `distributed` is (rank, world size).

    `batch_size` is per rank. `seed` determines order and augmentation, and must be equal on all
    ranks. `training` shuffles each epoch, seeds the augmentation and drops an incomplete last
    batch. `workers` is the number of processes that decode, at most one per core; 0 means that this
    process decodes. Batches do not depend on `workers`. `pin_memory` copies batches to page-locked
    memory, for a GPU. `repeats` is the number of augmented copies of an image in an epoch
    (arXiv 1902.05509). The epoch then shows only 1 / `repeats` of the images.

    Raises:
        ConfigError: a value is out of range.
        DataError: a training epoch would have no batch.
    """
    rank, world_size = distributed
    if batch_size < 1 or workers < 0 or not 0 <= rank < world_size:
        raise ConfigError(
            "expected batch_size >= 1, workers >= 0 and 0 <= rank < ranks, got "
            f"{batch_size}, {workers} and rank {rank} of {world_size}"
        )
    batches = EpochBatches(dataset, batch_size, training, seed, distributed, repeats)
    if training and not len(batches):
        raise DataError(
            f"expected at least one full batch of {batch_size} images on each of {world_size} "
            f"ranks, but the training set has {len(dataset)} images: use a smaller batch size"
        )
    # more workers would compete for the cores
    return Loader(dataset, batches, min(workers, usable_cores()), pin_memory)


def _iterator(loader: DataLoader[Any]) -> Iterator[_Found]:
    """Return an iterator. New workers block SIGINT and SIGTERM until `_start_worker` has run."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows cannot block signals
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker: int) -> None:
    """Start a new process group. Ignore SIGINT, and a SIGTERM that was sent before this call."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # terminals and torchrun send signals to the whole group
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # discards the signal if it is pending
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
