"""Tables of each class's images and predictions, and a picture of the confusion matrix."""

import csv
import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tresnet import writing
from tresnet.engine.distributed import Processes

FILES = TABLE, CONFUSION, PICTURE = ("per_class.csv", "confusion.csv", "confusion.png")
_NAMED = 60  # with more classes, their names do not fit beside the picture
_NUMBERED = 15  # with more classes, the numbers of images do not fit into its cells


@dataclass(frozen=True)
class ClassCounts:
    """Numbers of images by class; all tensors are int64, with C classes in the data's order."""

    images: Tensor  # (C,) images that have the label
    predicted: Tensor  # (C,) images for which the class is predicted
    confusion: Tensor  # (C, C) images that have the row's label and the column's prediction

    @property
    def correct(self) -> Tensor:
        return self.confusion.diagonal()


class ClassCounter:
    """Collector of each image's labels and predictions in an evaluation."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._batches: list[tuple[Tensor, ...]] = []

    def add(self, targets: Tensor, predicted: Tensor) -> None:
        """Add a batch: classes (N,), or zeros and ones (N, C) and bool predictions (N, C)."""
        labels = targets if predicted.dim() == 1 else targets > 0.5
        self._batches.append((labels.cpu(), predicted.cpu()))

    def counts(self, processes: Processes) -> ClassCounts:
        """Return the numbers of all processes' images (a collective)."""
        parts = processes.gather([torch.cat(parts) for parts in zip(*self._batches, strict=True)])
        labels, predictions = (torch.cat(each) for each in zip(*filter(None, parts), strict=True))
        if labels.dim() == 1:
            pairs = labels * self._classes + predictions
            confusion = torch.bincount(pairs, minlength=self._classes**2)
            confusion = confusion.view(self._classes, self._classes)
            return ClassCounts(confusion.sum(1), confusion.sum(0), confusion)
        confusion = (labels.double().T @ predictions.double()).long()
        return ClassCounts(labels.sum(0), predictions.sum(0), confusion)


def write(
    directory: Path,
    counts: ClassCounts,
    names: Sequence[str],
    precisions: Sequence[float | None] | None = None,
) -> list[str]:
    """Write the tables and, if matplotlib is installed, the picture; return the files' names.

    `names` are the classes, and `precisions` their average precisions in percent, for images with
    any number of labels. WriteError: a file cannot be written.
    """
    with writing.as_write_error(directory):
        directory.mkdir(exist_ok=True)
    score = "accuracy" if precisions is None else "average_precision"
    head = ["class", "images", "predicted", "correct", score, "precision", "recall", "f1"]
    rows = []
    for index, name in enumerate(names):
        has, said, hits = (
            int(count[index]) for count in (counts.images, counts.predicted, counts.correct)
        )
        recall, precision, f1 = _pct(hits, has), _pct(hits, said), _pct(2 * hits, has + said)
        own = recall if precisions is None else precisions[index]
        scores = ("" if value is None else f"{value:.6g}" for value in (own, precision, recall, f1))
        rows.append([name, has, said, hits, *scores])
    _write_csv(directory / TABLE, [head, *rows])
    matrix = ([name, *row] for name, row in zip(names, counts.confusion.tolist(), strict=True))
    _write_csv(directory / CONFUSION, [["label / predicted", *names], *matrix])
    drawn = _draw(directory / PICTURE, counts, names)
    return [TABLE, CONFUSION, *([PICTURE] if drawn else [])]


def _pct(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with writing.atomic_write(path) as temporary:  # names of folders may not be UTF-8
        temporary.write_bytes(text.getvalue().encode(errors="surrogateescape"))


def _draw(path: Path, counts: ClassCounts, names: Sequence[str]) -> bool:
    """Draw each row of the matrix as fractions of the images that have the row's label."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    side = 3 + 0.25 * min(len(names), _NAMED)
    figure = Figure(figsize=(side + 1, side), layout="constrained", dpi=120)
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    fractions = counts.confusion.float() / counts.images.clamp(min=1)[:, None]
    image = axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="label")
    figure.colorbar(image, label="fraction of the label's images")
    if len(names) <= _NAMED:
        short = [name.encode(errors="replace").decode()[:30] for name in names]
        axes.set_xticks(range(len(names)), short, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), short, parse_math=False)
    for row, column in counts.confusion.nonzero().tolist() if len(names) <= _NUMBERED else ():
        color = "white" if fractions[row, column] > 0.5 else "black"
        number = str(int(counts.confusion[row, column]))
        axes.text(column, row, number, ha="center", va="center", color=color, fontsize="small")
    with writing.atomic_write(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a character of a name
        canvas.print_png(str(temporary))
    return True
