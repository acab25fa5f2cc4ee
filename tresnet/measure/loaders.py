"""`tresnet bench loader`: images per second of data loaders that take turns over epochs.

Nobody computes with the images meanwhile: what is timed is how fast workers decode, augment and hand
over batches. A worker's batches come in bursts, so a whole visit is timed, not each batch.
"""

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tresnet.errors import InputError
from tresnet.measure.clock import HostClock
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, Outcome, Rounds, RunSettings, check_numbers, run

Epoch = Iterable[tuple[Tensor, Any]]
METHOD = {
    "order": "every round visits every loader, forwards and backwards in turn",
    "timed": "from the last warm-up batch to the last batch of an epoch",
    "timm": "create_dataset and create_loader: bytes are what its workers give its prefetcher, floats "
    "are without it, divided by a deviation of 1, which its API cannot leave out",
}


@dataclasses.dataclass(frozen=True)
class LoaderSettings(RunSettings):
    """How a comparison of loaders runs; every round is one epoch of each.

    Attributes:
        batch_size: images in a batch.
        input_size: side of the square image in pixels.
        workers: processes that load; 0 loads in this one.
        batches: timed ones of each visit.
        warmup_batches: before them; the first have the start of the workers or the epoch in them.
    """

    batch_size: int = 64
    input_size: int = 224
    workers: int = 2
    batches: int = 8
    warmup_batches: int = 4

    def __post_init__(self) -> None:
        """Raise `InputError` for what nothing can be measured with."""
        super().__post_init__()
        check_numbers(
            self, rounds=1, batch_size=1, input_size=1, workers=0, batches=1, warmup_batches=1
        )

    @property
    def epoch_images(self) -> int:
        """Images of one visit."""
        return self.batch_size * (self.warmup_batches + self.batches)


class LoaderContender(Contender):
    """A loader: an iterable of batches (images, labels) with a `close`."""

    def __init__(self, name: str, opened: Callable[[], Epoch], settings: LoaderSettings) -> None:
        """Keep what opens it."""
        self._open, self._settings = opened, settings
        self._epoch: Any = None
        self._clock = HostClock()
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
        return [elapsed_s / self._settings.batches]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Images/s of each round, their median and range."""
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
    settings: LoaderSettings,
    *,
    about: Mapping[str, Any],
    output_dir: str | os.PathLike[str],
    argv: Sequence[str],
    log: Callable[[str], object],
) -> tuple[Outcome, RecordFile]:
    """Time loaders in turns, and record it.

    Args:
        loaders: what opens each, by name; the first is the base of the ratios.
        settings: shared by all.
        about: further settings for the record, what is loaded say.
        output_dir: of the record.
        argv: the command line, for the record.
        log: called with a line of progress.
    """
    record = RecordFile(
        output_dir,
        "bench_loader",
        device=None,
        settings={**dataclasses.asdict(settings), **about, "method": METHOD},
        warmup_steps=settings.warmup_batches,
        runs=settings.rounds,
        argv=argv,
    )
    group = [LoaderContender(name, opened, settings) for name, opened in loaders.items()]
    return run([group], settings, log=log, save=record.write), record
