"""Images per second of data loaders that take turns over epochs of the same length.

Nobody computes with the images meanwhile: what is timed is how fast workers decode, augment and hand
over batches. A worker's batches come in bursts, so a whole visit is timed, not each batch.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tresnet.errors import InputError
from tresnet.measure.clock import HostClock

Epoch = Iterable[tuple[Tensor, Any]]


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """How a comparison of loaders runs.

    Attributes:
        batch_size: images in a batch.
        input_size: side of the square image in pixels.
        workers: processes that load; 0 loads in this one.
        rounds: visits to each loader, each of one epoch.
        batches: timed ones of each visit.
        warmup_batches: before them; the first have the start of the workers or the epoch in them.
    """

    batch_size: int = 64
    input_size: int = 224
    workers: int = 2
    rounds: int = 5
    batches: int = 8
    warmup_batches: int = 4

    def __post_init__(self) -> None:
        """Raise `InputError` for what nothing can be measured with."""
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "workers" else 1
            if value < least:
                raise InputError(f"expected {field.name} of at least {least}, got {value}")

    @property
    def epoch_images(self) -> int:
        """Images of one visit."""
        return self.batch_size * (self.warmup_batches + self.batches)


@dataclasses.dataclass(frozen=True)
class LoaderRow:
    """One loader.

    Attributes:
        case: its name.
        dtype: of the images.
        batch_bytes: of the images of one batch: what workers hand over and a GPU is sent.
        p50_images_per_s: median over the rounds.
        ratio_to_first: median over the rounds of its images/s over the first case's.
        round_images_per_s: one value a round.
    """

    case: str
    dtype: str
    batch_bytes: int
    p50_images_per_s: float
    ratio_to_first: float
    round_images_per_s: list[float]


def compare_loaders(
    cases: Mapping[str, Epoch],
    settings: LoaderSettings,
    log: Callable[[str], object] = lambda line: None,
) -> list[LoaderRow]:
    """Time the loaders in turns, forwards and backwards through them.

    Args:
        cases: what each gives an epoch of `settings.epoch_images` images when it is iterated.
        settings: shared by all.
        log: called with a line of progress.

    Returns:
        One row a case, in their order; the first is the base of the ratios.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    batches: dict[str, Tensor] = {}
    names = list(cases)
    for number in range(settings.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds, batches[name] = _visit(cases[name], settings)
            rates[name].append(settings.batch_size * settings.batches / seconds)
        log(f"round {number + 1} of {settings.rounds} done")
    return [_row(name, batches[name], rates[name], rates[names[0]]) for name in names]


def _visit(epoch: Epoch, settings: LoaderSettings) -> tuple[float, Tensor]:
    """Seconds of the timed batches of one epoch, and its last batch of images."""
    clock = HostClock()
    marks: list[float] = []
    images: Tensor | None = None
    for batch in epoch:
        marks.append(clock.mark())
        images = batch[0]
    expected = settings.warmup_batches + settings.batches
    if images is None or len(marks) != expected or len(images) != settings.batch_size:
        raise InputError(
            f"expected an epoch of {expected} batches of {settings.batch_size} images, "
            f"got {len(marks)}"
        )
    return clock.seconds(marks[settings.warmup_batches - 1], marks[-1]), images


def _row(name: str, images: Tensor, rates: Sequence[float], first: Sequence[float]) -> LoaderRow:
    return LoaderRow(
        case=name,
        dtype=str(images.dtype).removeprefix("torch."),
        batch_bytes=images.nbytes,
        p50_images_per_s=statistics.median(rates),
        ratio_to_first=statistics.median(
            own / base for own, base in zip(rates, first, strict=True)
        ),
        round_images_per_s=list(rates),
    )
