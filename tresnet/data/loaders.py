"""Load batches whose order and augmentation depend only on (seed, epoch), not on the workers.

`EpochBatches` lists the images and seeds of each batch. A resumed run can therefore continue inside
an epoch. torch's DataLoader runs the workers. Forked workers write to shared memory (`_Slots`).
"""

import dataclasses
import logging
import mmap
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from functools import partial
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
_IN_USE = 4  # slots for batches that the main process still holds (see `_Slots`)

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
        self._training = training
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
        if self._training:
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
        return index, mix_seed(*parts) if self._training else None


class Loader:
    """Iterates over the batches of one epoch: images (N, C, H, W) and labels (N,), int64.

    Multi-label data have labels (N, classes), float32. An unreadable image raises DataError, unless
    the data set has `skip_bad_images`. With `skip_bad_images`, training shows another image
    instead, and evaluation makes the batch smaller. `skipped` maps the paths of this rank's
    unreadable images to reasons. Worker processes run from the first iteration until `close`.
    """

    def __init__(
        self,
        batches: EpochBatches,
        start_workers: Callable[[], DataLoader[Any]],
        skip_bad_images: bool,
    ) -> None:
        self._sampler = batches
        self._start_workers = start_workers
        self._loader: DataLoader[Any] | None = None
        self._skip_bad_images = skip_bad_images
        self.skipped: dict[str, str] = {}

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch and its first batch; raise ConfigError if there is no such batch."""
        self._sampler.set_epoch(epoch, start_batch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if self._loader is None:
            self._loader = self._start_workers()
        for found in _iterator(self._loader):
            try:
                self._account(found.failures, found.unfilled)
            except DataError:
                self.close()
                raise
            if found.count:
                yield found.tensors()

    def close(self) -> None:
        """Stop the workers now. The garbage collector would need 5 s to stop each of them."""
        self._loader = None

    def _account(self, failures: list[BadImageError], unfilled: bool) -> None:
        for failure in failures:
            if not self._skip_bad_images:
                raise DataError(f"{failure}, or leave such files out with --skip-bad-images")
            if failure.path not in self.skipped:
                self.skipped[failure.path] = failure.reason
                logger.warning("skipped %s: %s", failure.path, failure.reason)
        if unfilled:
            raise DataError(
                f"{_REPLACEMENT_TRIES} images in a row cannot be read, the last is "
                f"{failures[-1].path}: repair the data set"
            )


class _Slots:
    """Shared memory for batches: forked workers write them, and the main process reads them.

    A slot is a part of the memory. It holds one batch, and is reused after all tensors of the batch
    are freed. Allocating memory for each batch would take longer than writing the pixels.
    """

    def __init__(self, count: int, batch_size: int, image: torch.Tensor) -> None:
        like = _in_memory_order(image).numpy()
        self._count, self._shape, self._dtype = count, like.shape, like.dtype
        self._bytes = batch_size * like.nbytes
        self._memory = mmap.mmap(-1, count * self._bytes)
        self._asked: set[int] = set()
        self._held: set[int] = set()
        _made_here[id(self)] = self

    def __reduce__(self) -> Any:
        """Pickle only an id, by which `_slots_of` finds the object in a forked worker."""
        return _slots_of, (id(self),)

    def begin(self) -> None:
        self._asked.clear()

    def take(self) -> int | None:
        free = (n for n in range(self._count) if n not in self._asked and n not in self._held)
        slot = next(free, None)
        if slot is not None:
            self._asked.add(slot)
        return slot

    def images(self, slot: int, count: int) -> torch.Tensor:
        """Return a slot's first `count` images; the slot is reused after the result is freed."""
        shape = (count, *self._shape)
        array = np.ndarray(shape, self._dtype, self._memory, slot * self._bytes)
        self._held.add(slot)
        self._asked.discard(slot)
        # the array is freed after all tensors that share its memory
        weakref.finalize(array, self._held.discard, slot).atexit = False
        return torch.from_numpy(array)


_made_here: weakref.WeakValueDictionary[int, _Slots] = weakref.WeakValueDictionary()


def _slots_of(number: int) -> _Slots:
    return _made_here[number]


class _Asked(torch.utils.data.Sampler[tuple[int | None, list[Key]]]):
    """Yields (number, keys) for each batch: a free slot's number, or None if no slot is free."""

    def __init__(self, batches: EpochBatches, slots: _Slots | None) -> None:
        self._batches, self._slots = batches, slots

    def __iter__(self) -> Iterator[tuple[int | None, list[Key]]]:
        if self._slots is not None:
            self._slots.begin()  # no worker writes now: torch waited for all earlier batches
        for keys in self._batches:
            yield None if self._slots is None else self._slots.take(), keys


@dataclasses.dataclass(frozen=True)
class _Found:
    """Batch that `_Batches` has read. `images` is None if no image of the batch is readable.

    A pair (slots, number) means that the images are in that slot. Without slots, workers send
    arrays: for tensors, torch would open a socket below TMPDIR, whose path may be too long. If
    `unfilled`, an unreadable image has no replacement. If `innermost`, each image is (H, W, C).
    """

    count: int
    images: np.ndarray | torch.Tensor | tuple[_Slots, int] | None
    labels: Any
    failures: list[BadImageError]
    unfilled: bool
    innermost: bool = False

    def tensors(self) -> Batch:
        assert self.images is not None
        if isinstance(self.images, tuple):
            slots, slot = self.images
            images = slots.images(slot, self.count)
        else:
            images = torch.as_tensor(self.images)
        labels = torch.as_tensor(self.labels)
        return images.permute(0, 3, 1, 2) if self.innermost else images, labels

    def pin_memory(self, device: Any = None) -> "_Found":
        """Copy the batch to pinned memory; torch calls this in a thread of the main process."""
        if not self.count:
            return self
        images, labels = (tensor.pin_memory() for tensor in self.tensors())
        return dataclasses.replace(self, images=images, labels=labels, innermost=False)


class _Batches(Dataset[Any]):
    """Data set of `_Found`s. They carry errors, because torch turns raised errors into text."""

    def __init__(self, dataset: SizedDataset, replace: bool) -> None:
        self._dataset = dataset
        self._replace = replace
        self._slots: _Slots | None = None

    def make_slots(self, count: int, batch_size: int, key: Key) -> _Slots | None:
        """Allocate slots for images like that of `key`; return None if it is no readable tensor."""
        with preserved_generators():
            found = self._sample(*key, [])
        if found is not None and isinstance(found[0], torch.Tensor):
            self._slots = _Slots(count, batch_size, found[0])
        return self._slots

    def __getitems__(self, asked: tuple[int | None, list[Key]]) -> _Found:
        """Read a batch; copy each image to its slot while the image is in the CPU's cache."""
        slot, keys = asked
        failures: list[BadImageError] = []
        place = None if self._slots is None or slot is None else (self._slots, slot)
        room = None if place is None else place[0].images(place[1], len(keys))
        images: list[Any] = []
        labels: list[Any] = []
        innermost = False
        with preserved_generators() if get_worker_info() is None else nullcontext():
            for key in keys:
                if (item := self._sample(*key, failures)) is not None:
                    image = _in_memory_order(item[0])
                    innermost = image is not item[0]
                    images.append(image if room is None else room[len(images)].copy_(image))
                    labels.append(item[1])
        unfilled = self._replace and len(images) < len(keys)
        if not images:
            return _Found(0, None, None, failures, unfilled)
        marks = default_collate(labels).numpy()
        found = default_collate(images).numpy() if place is None else place
        return _Found(len(images), found, marks, failures, unfilled, innermost)

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
    skip_bad_images = bool(getattr(dataset, "skip_bad_images", False))
    replace = training and skip_bad_images
    workers = min(workers, usable_cores())  # more workers would compete for the cores
    start_workers = partial(_start, dataset, replace, batches, workers, pin_memory)
    return Loader(batches, start_workers, skip_bad_images)


def _start(
    dataset: SizedDataset, replace: bool, batches: EpochBatches, workers: int, pin_memory: bool
) -> DataLoader[Any]:
    """Allocate shared memory for batches if workers are forked, and return torch's DataLoader."""
    source, slots = _Batches(dataset, replace), None
    if workers and multiprocessing.get_start_method() == "fork" and len(batches):
        count = _AHEAD * workers + _IN_USE
        slots = source.make_slots(count, batches.batch_size, batches.key(0))
    return DataLoader(
        source,
        batch_sampler=_Asked(batches, slots),  # type: ignore[arg-type]  lists with a slot's number
        num_workers=workers,
        collate_fn=torch.nn.Identity(),  # the data set returns whole batches
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        prefetch_factor=_AHEAD if workers else None,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # otherwise DataLoader draws from the global generator
    )


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
