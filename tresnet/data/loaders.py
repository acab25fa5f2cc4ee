"""Load batches whose order and augmentation depend only on (seed, epoch), not on the workers.

`EpochBatches` lists the images and seeds of each batch, so a resumed run can continue inside an
epoch. torch's DataLoader runs the workers, which write decoded crops to shared memory.
"""

import logging
from collections.abc import Iterator, Sized
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from tresnet.cores import usable_cores
from tresnet.data.crops import Crops, RenderSpec, Sample, arena_bytes, write_sample
from tresnet.data.decoding import BadImageError
from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.data.workers import (
    Shared,
    SharedMemory,
    iterate,
    prepare,
    start_method,
    start_worker,
)
from tresnet.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# Unless more than nine in ten images are unreadable, so many tries fail for one image in 10^11.
_REPLACEMENT_TRIES = 256
_AHEAD = 2  # batches that each worker prepares in advance
_SLOTS = _AHEAD + 1  # batches for which each worker has shared memory (see `_BatchDataset`)

Key = tuple[int, int | None]  # an image's index and augmentation seed (None in evaluation)
Batch = tuple[Crops, torch.Tensor]


class SizedDataset(Protocol):
    """Data set of samples with labels. The label of a multi-label image is a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Sample, Any]: ...


class EpochBatches(torch.utils.data.Sampler[list[Key]]):
    """Batch sampler of one rank, which yields each batch as a list of `Key`s.

    Training shuffles the images by (seed, epoch) and distributes them over ranks like torch's
    DistributedSampler. With an equal total batch size, the batches b of all ranks together have the
    same images for any number of ranks. The shuffled order has each image `repeats` times in a row.
    An epoch keeps its number of batches, so it shows 1 / `repeats` of the images. Evaluation keeps
    the data set's order, does not pad, and gives each image to exactly one rank.

    With `weights`, training draws each image of an epoch independently, with a probability in
    proportion to its weight, as torch's WeightedRandomSampler does. All ranks make the same draws.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        training: bool,
        seed: int,
        distributed: tuple[int, int],
        repeats: int = 1,
        weights: np.ndarray | None = None,
    ) -> None:
        rank, world_size = distributed
        self._images = len(dataset)
        # WeightedRandomSampler's torch.multinomial takes at most 2^24 images
        self._cumulative = None if weights is None else weights.cumsum()
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
        order = self._order()
        for batch in range(self._start_batch, self._batches):
            begin = batch * self.batch_size
            keys = list[Key]()
            for position in self._own[begin : begin + self.batch_size]:
                shuffled, copy = divmod(position, self._repeats)
                copy = copy if self._cumulative is None else position  # an image may be drawn again
                keys.append(self.key(int(order[shuffled]), copy))
            yield keys

    def _order(self) -> Any:
        """Return the index of the image at each position of the epoch, alike on all ranks."""
        if not self.training:
            return range(self._images)
        generator = torch.Generator().manual_seed(mix_seed(self._seed) + self._epoch)
        if self._cumulative is None:
            return torch.randperm(self._images, generator=generator).numpy()
        draws = torch.rand(self._images, generator=generator, dtype=torch.float64).numpy()
        order = self._cumulative.searchsorted(draws * self._cumulative[-1], side="right")
        return order.clip(max=self._images - 1)  # a product may round up to the sum of all weights

    def key(self, index: int, copy: int = 0) -> Key:
        """Return the key of one copy of an image; in training, each copy has its own seed."""
        parts = (self._seed, self._epoch, index, copy)[: 4 if copy else 3]
        return index, mix_seed(*parts) if self.training else None


class Loader:
    """Iterable over the batches of one epoch: `Crops` of N images, and labels (N,), int64.

    Multi-label data have labels (N, classes), float32. An unreadable image raises DataError, unless
    the data set has `skip_bad_images`. With `skip_bad_images`, training replaces the image by
    another one, and evaluation makes the batch smaller. `skipped` maps the paths of this rank's
    unreadable images to reasons. Worker processes run from the first iteration until `close`. If
    one dies, DataError is raised.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        batch_size: int,
        *,
        training: bool,
        workers: int = 0,
        seed: int = 0,
        distributed: tuple[int, int] = (0, 1),
        pin_memory: bool = False,
        repeats: int = 1,
        weights: np.ndarray | None = None,
        render: bool = False,
    ) -> None:
        """Make the loader of one rank; `distributed` is (rank, world size).

        `batch_size` is per rank. `seed` determines order and augmentation, and must be equal on all
        ranks. `training` shuffles each epoch, seeds the augmentation and drops an incomplete last
        batch. `workers` is the number of processes that decode, at most one per core; 0 means that
        this process decodes. Batches' images do not depend on `workers`. `pin_memory` pins their
        memory, for faster copies to a GPU. `repeats` is the number of augmented copies of an image
        in an epoch (arXiv 1902.05509). The epoch then shows only 1 / `repeats` of the images.
        `weights` (images,) are float64: training draws images in proportion to them. `render` lets
        workers make complete images, for GPUs on which kernels cannot; the images are the same.

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
        self._sampler = EpochBatches(
            dataset, batch_size, training, seed, distributed, repeats, weights
        )
        if training and not len(self._sampler):
            raise DataError(
                f"expected at least one full batch of {batch_size} images on each of {world_size} "
                f"ranks, but the training set has {len(dataset)} images: use a smaller batch size"
            )
        self._workers = min(workers, usable_cores())  # more workers would compete for the cores
        if self._workers:
            prepare()
        self._skips = bool(getattr(dataset, "skip_bad_images", False))
        self._source = _BatchDataset(dataset, batch_size, self._skips and training, render)
        self._pin_memory = pin_memory
        self._loader: DataLoader[Any] | None = None
        self.skipped: dict[str, str] = {}

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch and its first batch; an index out of range raises ConfigError."""
        self._sampler.set_epoch(epoch, start_batch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if self._loader is None:
            self._loader = self._start()
        for batch in iterate(self._loader):
            try:
                self._check_failures(batch)
            except DataError:
                self.close()
                raise
            if len(batch.rows):
                yield batch.tensors(self._source.memory, self._pin_memory)

    def close(self) -> None:
        """Stop the workers now, because at garbage collection each would take 5 s to stop."""
        self._loader = self._source.memory = None

    def _start(self) -> DataLoader[Any]:
        batches, workers, source = self._sampler, self._workers, self._source
        if workers and len(batches):
            source.share_memory(workers, batches.key(0))
        forked = not workers or start_method() == "fork"
        return DataLoader(
            source if forked else Shared(source),  # type: ignore[arg-type]  workers get the source
            batch_sampler=batches,  # type: ignore[arg-type]  lists of keys
            num_workers=workers,
            collate_fn=torch.nn.Identity(),  # the data set returns whole batches
            worker_init_fn=start_worker,
            prefetch_factor=_AHEAD if workers else None,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # otherwise DataLoader draws from the global generator
        )

    def _check_failures(self, batch: "_LoadedBatch") -> None:
        for failure in batch.failures:
            if not self._skips:
                raise failure.advising_skip()
            if failure.path not in self.skipped:
                self.skipped[failure.path] = failure.reason
                logger.warning("skipped %s: %s", failure.path, failure.reason)
        if self._sampler.training and len(batch.rows) < self._sampler.batch_size:
            raise DataError(
                "expected images to train on, but more than nine in ten images cannot be read, "
                f"such as {batch.failures[-1].path}: repair the data set"
            )


class _LoadedBatch(NamedTuple):
    """Batch that `_BatchDataset` reads; `pixels` is the used part of an arena of `capacity` bytes.

    Workers send NumPy arrays, because torch sends tensors through a socket in TMPDIR, and fails if
    that path is too long. For an arena in shared memory, `pixels` is the range of its used bytes.
    `spec` is None if no image of the batch is readable.
    """

    pixels: np.ndarray | tuple[int, int]
    rows: np.ndarray
    spec: RenderSpec | None
    capacity: int
    labels: Any
    failures: list[BadImageError]

    def tensors(self, memory: SharedMemory | None, pin: bool) -> Batch:
        """Return crops and labels, copied out of shared memory, and into pinned memory if `pin`."""
        assert self.spec is not None, "the batch has images"
        pixels, rows, labels = self.pixels, torch.as_tensor(self.rows), torch.as_tensor(self.labels)
        if isinstance(pixels, tuple):
            assert memory is not None, "workers have written to it"
            pixels = memory.view(*pixels)
            pixels = pixels if pin else pixels.copy()  # NumPy's larger pages are faster
        pixels = torch.as_tensor(pixels)
        if pin:
            # PyTorch gives a block again when all copies from it have ended. As all batches take
            # blocks of one size, there are three: filled, copied to the GPU, and held by the user.
            pinned = _pinned(self.capacity)[: len(pixels)]
            pixels, rows, labels = pinned.copy_(pixels), rows.pin_memory(), labels.pin_memory()
        return Crops(pixels, rows, self.spec, self.capacity), labels


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _BatchDataset(Dataset[Any]):
    """Data set of whole batches. A batch holds errors, which torch would turn into text if raised.

    Workers write crops into shared memory that is allocated once, which is faster than new memory
    for each batch. Each worker rotates through `_SLOTS` slots of one arena each. One slot
    more than `_AHEAD` is enough, because the main process copies each batch that it receives.
    """

    def __init__(self, dataset: SizedDataset, batch_size: int, replace: bool, render: bool) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._replace, self._render = replace, render
        self.memory: SharedMemory | None = None
        self._capacity = self._slot = 0

    def share_memory(self, workers: int, key: Key) -> None:
        """Allocate shared memory for images of the sample `key`, if it can be read."""
        with preserved_generators():
            item = self._sample(*key, [])
        if item is not None:
            self._capacity = arena_bytes(self._batch_size, item[0].spec)
            self.memory = SharedMemory(workers * _SLOTS * self._capacity)

    def __getitems__(self, keys: list[Key]) -> _LoadedBatch:
        """Read a batch; write each crop to the arena while it is in the CPU's cache."""
        failures: list[BadImageError] = []
        rows: list[np.ndarray] = []
        labels: list[Any] = []
        arena = begin = spec = None
        used, worker = 0, get_worker_info()
        if worker is not None and self.memory is not None:
            self._slot = (self._slot + 1) % _SLOTS
            begin = (worker.id * _SLOTS + self._slot) * self._capacity
            arena = self.memory.view(begin, begin + self._capacity)
        with preserved_generators() if worker is None else nullcontext():
            for index, key in enumerate(keys):
                if (item := self._sample(*key, failures)) is not None:
                    spec = item[0].spec
                    if arena is None:  # pages that are not used take no memory
                        arena = np.empty(arena_bytes(self._batch_size, spec), np.uint8)
                    used, row = write_sample(item[0], arena, used, len(keys) - index - 1)
                    rows.append(row)
                    labels.append(item[1])
                elif self._replace:
                    break
        if spec is None or arena is None:
            return _LoadedBatch(np.empty(0), np.empty(0), None, 0, None, failures)
        pixels = arena[:used] if begin is None else (begin, begin + used)
        targets, table = default_collate(labels).numpy(), np.stack(rows)
        return _LoadedBatch(pixels, table, spec, len(arena), targets, failures)

    def _sample(
        self, index: int, seed: int | None, failures: list[BadImageError]
    ) -> tuple[Sample, Any] | None:
        for attempt in range(_REPLACEMENT_TRIES):
            if seed is not None:
                seed_cpu_generators(seed)
            try:
                sample, label = self._dataset[index]
                return sample.rendered() if self._render else sample, label
            except BadImageError as error:
                failures.append(BadImageError(error.path, error.reason))  # without the traceback
            if seed is None or not self._replace:
                break
            index = mix_seed(seed, attempt) % len(self._dataset)
        return None
