"""Batches whose order and augmentation follow from (seed, epoch), with any number of workers."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    default_collate,
    get_worker_info,
)

from tresnet.data.pictures import BadImageError
from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_REPLACEMENT_TRIES = 16

Key = tuple[int, int | None]  # index of the image; seed of its augmentation, None in evaluation
Batch = tuple[torch.Tensor, torch.Tensor]


class SizedDataset(Protocol):
    """A map-style data set of (image tensor, label, or a tensor of labels)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


class EpochBatches(torch.utils.data.Sampler[list[Key]]):
    """Lists of keys for one rank, a pure function of (seed, epoch).

    Training shuffles and shares out as torch's DistributedSampler: global batch b is the same
    images whatever the number of ranks. Evaluation goes in order, each image on one rank only,
    without padding.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        training: bool,
        seed: int,
        distributed: tuple[int, int],
    ) -> None:
        self._training = training
        self._seed = seed
        self._batch_size = batch_size
        self._epoch = 0
        self._start_batch = 0
        rank, world_size = distributed
        self._order: DistributedSampler[Any] | range = range(rank, len(dataset), world_size)
        if training:
            self._order = DistributedSampler(
                dataset,  # type: ignore[arg-type]  only its length is used
                num_replicas=world_size,
                rank=rank,
                seed=mix_seed(seed),
                drop_last=True,
            )
        full, rest = divmod(len(self._order), batch_size)
        self._batches = full if training else full + bool(rest)

    def set_epoch(self, epoch: int, start_batch: int) -> None:
        """Choose the epoch to iterate and the batch to begin with."""
        if not 0 <= start_batch <= self._batches:
            raise ConfigError(
                f"expected start_batch from 0 to {self._batches}, the batches of an epoch, got "
                f"{start_batch}: were the data, the batch size or the number of ranks changed?"
            )
        self._epoch, self._start_batch = epoch, start_batch

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self._batches

    def __iter__(self) -> Iterator[list[Key]]:
        if isinstance(self._order, DistributedSampler):
            self._order.set_epoch(self._epoch)
        order = list(self._order)
        for batch in range(self._start_batch, self._batches):
            begin = batch * self._batch_size
            yield [self._key(index) for index in order[begin : begin + self._batch_size]]

    def _key(self, index: int) -> Key:
        return index, mix_seed(self._seed, self._epoch, index) if self._training else None


class Loader:
    """Iterates over (images (N, C, H, W), labels (N,) int64) of one epoch.

    Where images have several labels these are (N, classes), float32.

    Unreadable images either stop the iteration or are left out and counted, as the data set's
    `skip_bad_images` says. In training another image takes the place, so that batches keep their
    size; in evaluation the batch is smaller, so that every metric counts readable images only.
    The workers live from the first iteration to `close`, across epochs.

    Attributes:
        skipped: unreadable files met so far on this rank, path to reason: each file once,
            whichever worker met it and however often.
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
        """Choose the epoch that the next iteration yields, from its batch `start_batch` on.

        Raises:
            ConfigError: the epoch has fewer batches.
        """
        self._sampler.set_epoch(epoch, start_batch)

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the iteration starts."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            DataError: a file cannot be read and `skip_bad_images` is off; or no readable image
                could be found in its place.
        """
        if self._loader is None:
            self._loader = self._start_workers()
        for images, labels, failures, unfilled in _held_iter(self._loader):
            try:
                self._account(failures, unfilled)
            except DataError:
                self.close()
                raise
            if images is not None:
                yield images, labels

    def close(self) -> None:
        """Stop the workers at once; another iteration would start new ones.

        Left to the garbage collector, as in a cycle with an exception's traceback, torch waits
        5 s for each worker.
        """
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


class _Batches(Dataset[Any]):
    """The data set as the workers see it: seeded by key, failures returned instead of raised.

    An exception in a worker would reach the user as a text with a traceback in it.
    """

    def __init__(self, dataset: SizedDataset, replace: bool) -> None:
        self._dataset = dataset
        self._replace = replace

    def __getitems__(self, keys: list[Key]) -> tuple[Any, Any, list[BadImageError], bool]:
        """Images and labels, None if none is readable; the failures; if one was not replaced."""
        failures: list[BadImageError] = []
        with preserved_generators() if get_worker_info() is None else nullcontext():
            found = [self._sample(*key, failures) for key in keys]
        items = [item for item in found if item is not None]
        images, labels = _stack(items) if items else (None, None)
        return images, labels, failures, self._replace and len(items) < len(keys)

    def _sample(
        self, index: int, seed: int | None, failures: list[BadImageError]
    ) -> tuple[Any, Any] | None:
        for attempt in range(_REPLACEMENT_TRIES):
            if seed is not None:
                seed_cpu_generators(seed)
            try:
                return self._dataset[index]
            except BadImageError as error:
                failures.append(BadImageError(error.path, error.reason))  # without its traceback
            if seed is None or not self._replace:
                break
            index = mix_seed(seed, attempt) % len(self._dataset)
        return None


def _as_it_is(batch: Any) -> Any:
    return batch


def _stack(items: list[tuple[Any, Any]]) -> Any:
    """One batch, whose channels are innermost in memory if those of the images are."""
    first = items[0][0]
    if not isinstance(first, torch.Tensor) or first.is_contiguous() or first.dim() != 3:
        return default_collate(items)
    images, labels = default_collate([(image.permute(1, 2, 0), label) for image, label in items])
    return images.permute(0, 3, 1, 2), labels


def create_loader(
    dataset: SizedDataset,
    batch_size: int,
    *,
    training: bool,
    workers: int = 0,
    seed: int = 0,
    distributed: tuple[int, int] = (0, 1),
    pin_memory: bool = False,
) -> Loader:
    """Make the loader of one rank.

    Args:
        dataset: images and labels, for instance from `open_folder`.
        batch_size: images in a batch on this rank.
        training: shuffle by epoch, seed the augmentation and leave out a last batch that is not
            full; else go in order.
        workers: processes that decode, at most one a core; 0 decodes in this one. The batches are
            the same.
        seed: of the order and the augmentation; the same on all ranks.
        distributed: (rank, number of ranks).
        pin_memory: copy batches to page-locked memory, for a GPU.

    Raises:
        ConfigError: a number is out of range.
        DataError: a training epoch would have no batch.
    """
    rank, world_size = distributed
    if batch_size < 1 or workers < 0 or not 0 <= rank < world_size:
        raise ConfigError(
            "expected batch_size >= 1, workers >= 0 and 0 <= rank < ranks, got "
            f"{batch_size}, {workers} and rank {rank} of {world_size}"
        )
    batches = EpochBatches(dataset, batch_size, training, seed, distributed)
    if training and not len(batches):
        raise DataError(
            f"expected at least one full batch of {batch_size} images on each of {world_size} "
            f"ranks, but the training set has {len(dataset)} images: use a smaller batch size"
        )
    skip_bad_images = bool(getattr(dataset, "skip_bad_images", False))
    replace = training and skip_bad_images
    workers = min(workers, usable_cores())  # more would only wait for each other
    start_workers = partial(
        DataLoader,
        _Batches(dataset, replace),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # its own, so that iterating leaves the global one alone
    )
    return Loader(batches, start_workers, skip_bad_images)


def _start_worker(worker: int) -> None:
    """Leave Ctrl-C to the main process, and drop its handlers, which a fork copies here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that came while starting
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # out of the group that terminals and torchrun signal: the loop decides


def _held_iter(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start an iteration; SIGTERM waits: a worker just forked is still in the signalled group."""
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
