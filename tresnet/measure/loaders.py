"""`tresnet bench loader`: images per second of data loaders that take turns over epochs.

Nobody computes with the images meanwhile: what is timed is how fast workers decode, augment and
hand over batches. A worker's batches come in bursts, so a whole visit is timed, not each batch.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from tresnet.data.contenders import JPEG_SIZE, JPEGS, loaders_in, write_jpegs
from tresnet.data.folder import open_folder
from tresnet.data.loaders import usable_cores
from tresnet.data.shards import ShardSettings, write_shards
from tresnet.errors import InputError
from tresnet.measure.clock import HostClock
from tresnet.measure.records import RecordFile, check_directory
from tresnet.measure.runner import Contender, Log, Outcome, Rounds, run
from tresnet.measure.settings import LoaderSettings

Epoch = Iterable[tuple[Tensor, Any]]
METHOD = {
    "order": "every round visits every loader, forwards and backwards in turn",
    "timed": "from the last warm-up batch to the last batch of an epoch",
    "shares": "reading, decoding, resizing and augmenting timed in the main process after each "
    "visit; transport is what is left of a worker's time",
    "timm": "create_dataset and create_loader: bytes are what its workers give its prefetcher, "
    "floats are without it, divided by a deviation of 1, which its API cannot leave out",
}


class LoaderContender(Contender):
    """A loader: an iterable of batches (images, labels) with a `close`."""

    def __init__(self, name: str, opened: Callable[[], Epoch], settings: LoaderSettings) -> None:
        """Keep what opens it."""
        self._open, self._settings = opened, settings
        self._epoch: Any = None
        self._clock = HostClock()
        self._stages: list[dict[str, float]] = []
        self.label, self.units = name, settings.batch_size
        # batch_bytes: what workers hand over and a GPU is sent
        self.columns: dict[str, Any] = {"case": name, "dtype": None, "batch_bytes": None}

    def set_up(self) -> None:
        """Open the loader; each visit warms up by itself."""
        self._epoch = self._open()

    def visit(self) -> Sequence[float]:
        """Mean seconds of a batch of one epoch."""
        marks: list[float] = []
        images: Tensor | None = None
        for batch in self._epoch:
            marks.append(self._clock.mark())
            images = batch[0]
        warm, size = self._settings.warmup_batches, self._settings.batch_size
        expected = warm + self._settings.batches
        if images is None or len(marks) != expected or len(images) != size:
            raise InputError(
                f"expected an epoch of {expected} batches of {size} images, got {len(marks)}"
            )
        self.columns |= {
            "dtype": str(images.dtype).removeprefix("torch."),
            "batch_bytes": images.nbytes,
        }
        elapsed_s = self._clock.seconds(marks[warm - 1], marks[-1])
        if found := getattr(self._epoch, "stages", dict)():
            self._stages.append(found)
        return [elapsed_s / self._settings.batches]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Images/s of each round, their median and range; what a worker does with its time."""
        rates = [self.units / time_s for visit in rounds for time_s in visit]
        return self._shares(rates) | {
            "p50_images_per_s": statistics.median(rates) if rates else None,
            "least_images_per_s": min(rates, default=None),
            "most_images_per_s": max(rates, default=None),
            "round_images_per_s": rates,
        }

    def _shares(self, rates: list[float]) -> dict[str, Any]:
        """Percent of a worker's time for each stage; what is left is transport."""
        if not (rates and self._stages and self._settings.workers):
            return {}
        workers = min(self._settings.workers, usable_cores())
        whole_s = workers / statistics.median(rates)
        shares = {
            f"{name}_pct": 100 * statistics.median(each[name] for each in self._stages) / whole_s
            for name in self._stages[0]
        }
        shares["transport_pct"] = 100 - sum(shares.values())
        words = (f"{name.removesuffix('_pct')} {share:.0f} %" for name, share in shares.items())
        return shares | {"note": f"a worker's time: {', '.join(words)}"}

    def close(self) -> None:
        """Stop the workers."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


def bench_loaders(settings: LoaderSettings, argv: Sequence[str], log: Log) -> Outcome:
    """Time our, timm's, torchvision's and DALI's loaders in turns, and record it.

    Raises:
        InputError: a setting is out of range.
        DataError: there are no images.
    """
    settings.check()
    check_directory(settings.output_dir)  # before images are written
    with _images(settings) as (folder, data, shards):
        loaders = loaders_in(
            folder,
            settings.split,
            shards,
            length=settings.epoch_images,
            batch_size=settings.batch_size,
            size=settings.input_size,
            workers=settings.workers,
        )
        return compare_loaders(loaders, settings, data, argv, log)


def compare_loaders(
    loaders: Mapping[str, Callable[[], Epoch]],
    settings: LoaderSettings,
    data: str,
    argv: Sequence[str],
    log: Log,
) -> Outcome:
    """Time what each of `loaders` opens; the first is the base of the ratios. `data` names it."""
    record = RecordFile(
        settings.output_dir,
        "bench_loader",
        device=None,
        settings={**settings.to_dict(), "data": data, "method": METHOD},
        warmup_steps=settings.warmup_batches,
        runs=settings.rounds,
        argv=argv,
    )
    group = [LoaderContender(name, opened, settings) for name, opened in loaders.items()]
    return run([group], settings, log=log, record=record)


@contextlib.contextmanager
def _images(settings: LoaderSettings) -> Iterator[tuple[Path, str, dict[str, Path]]]:
    """The folder given or one for this run alone, what to call it, and shards of its images."""
    if settings.data is not None:
        shards = {} if settings.shards is None else {"shards": settings.shards}
        yield settings.data, settings.data.resolve().name, shards
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_jpegs(folder, settings.split)
        shards = {}
        if find_spec("array_record") is not None:
            for name, how in {
                "shards": ShardSettings(),
                "shards of short side 256": ShardSettings(short_side=256),
                "pixels of short side 256": ShardSettings(short_side=256, pixels=True),
            }.items():
                shards[name] = out = folder / name
                out.mkdir()
                write_shards(open_folder(folder, settings.split), folder, out, how)
        yield folder, f"{JPEGS} photographs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}, JPEG", shards
