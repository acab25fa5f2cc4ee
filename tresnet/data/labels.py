"""Labels of a data set as values: what a source states, its encoding, and a model's outputs.

A source of images yields `RawLabels`, and nothing else about labels. `encode` makes `Labels` of
them: indices of named classes. `match` compares the names with the outputs of a model, and decides
the order in which labels and outputs belong together. All three are values: nothing changes them.
"""

import logging
import os
import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tresnet.errors import ConfigError, DataError, listed

logger = logging.getLogger(__name__)

# Name of the file that lists the classes of label files in order.
CLASSES_FILE = "classes.txt"
_SHOWN = 5
_BLOCK = 4096  # rows of zeros and ones that are made at once
# How pandas, Python and SQL write a missing number; "none" may be a class, such as of defects.
_MISSING = {"nan", "NaN", "NAN", "None", "null", "NULL", "<NA>"}
# Readings of lists of numbers.
HOT, IDS = "read as lists of 0 or 1, one for each class", "read as lists of classes' numbers"


class RawLabels(NamedTuple):
    """Labels of a split's images, as its source states them.

    image      0          1     2
    labels     cat, dog         dog
    values     ["cat", "dog"]             each different label once, in any order
    codes      [0, 1,           1]        index of each label in `values`
    lengths    [2,        0,    1]        None: each image has one label
    """

    where: str  # the source, for errors
    values: Sequence[str] | Sequence[int]  # numbers are indices into `classes`, where it is given
    codes: np.ndarray  # (labels,), int64
    lengths: np.ndarray | None  # (images,), int64
    classes: Sequence[str] | None = None  # names that the source lists in order
    reading: str = ""  # how the labels were read, if that was a guess

    @classmethod
    def of(cls, where: str, rows: Iterable[Collection[str]], multi: bool, *facts: Any) -> Self:
        """Make raw labels of each image's labels; `facts` are `classes` and `reading`."""
        index: dict[str, int] = {}
        codes, lengths = array("q"), array("q")
        for row in rows:
            codes.extend(index.setdefault(label, len(index)) for label in row)
            lengths.append(len(row))
        ends = np.array(lengths, np.int64) if multi else None
        return cls(where, list(index), np.array(codes, np.int64), ends, *facts)


@dataclass(frozen=True, eq=False, repr=False)
class Labels:
    """Labels of a split's images, as indices of named classes.

    Memory grows with the number of labels, not with images times classes.
    """

    names: tuple[str, ...]
    indices: np.ndarray  # (labels,), int64: the class of each label, image by image
    ends: np.ndarray | None = None  # (images,), int64: end of each image's part; None: one each
    listed: bool = True  # whether the source lists its classes, or `names` are those that occur
    reading: str = ""  # how the labels were read, if that was a guess

    @property
    def multi(self) -> bool:
        """Whether an image may have any number of labels."""
        return self.ends is not None

    @property
    def numbered(self) -> bool:
        """Whether labels are numbers, without a list of the classes."""
        return not self.listed and all(map(str.isdecimal, self.names))

    @property
    def counts(self) -> np.ndarray:
        """Number of images of each class (classes,), int64."""
        return np.bincount(self.indices, minlength=len(self.names))

    @property
    def rarities(self) -> np.ndarray:
        """1 / (images of an image's class), float64 (images,); of several labels, the rarest one's.

        An image without labels has the smallest rarity (repeat factors, arXiv 1908.03195).
        """
        rarities = 1 / self.counts[self.indices]
        if self.ends is None:
            return rarities
        of_images = np.full(len(self), rarities.min(initial=1.0))
        rows = np.repeat(np.arange(len(self)), np.diff(self.ends, prepend=0))
        np.maximum.at(of_images, rows, rarities)
        return of_images

    def __len__(self) -> int:
        return len(self.indices if self.ends is None else self.ends)

    def __getitem__(self, image: int) -> int | Tensor:
        """Return an image's class, or for any number of labels a float32 (classes,) of 0 and 1."""
        if self.ends is None:
            return int(self.indices[image])
        return torch.from_numpy(next(self._rows(image, image + 1))[0]).float()

    def of_image(self, image: int) -> list[int]:
        """Return the classes of an image in ascending order."""
        end = image + 1 if self.ends is None else int(self.ends[image])
        begin = image if self.ends is None else int(self.ends[image - 1]) if image else 0
        return sorted(self.indices[begin:end].tolist())

    def targets(self) -> Iterator[np.ndarray]:
        """Yield all labels in parts: int64 (N,), or if `multi`, uint8 (N, classes) of 0 and 1."""
        return iter([self.indices]) if self.ends is None else self._rows(0, len(self))

    def _rows(self, begin: int, end: int) -> Iterator[np.ndarray]:
        assert self.ends is not None
        for first in range(begin, end, _BLOCK):
            ends = self.ends[first : min(first + _BLOCK, end)]
            start = int(self.ends[first - 1]) if first else 0
            rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=start))
            hot = np.zeros((len(ends), len(self.names)), np.uint8)
            hot[rows, self.indices[start : ends[-1]]] = 1
            yield hot

    def arranged(self, names: Sequence[str]) -> Self:
        """Return the labels as indices into `names`, which have the names of all classes here."""
        order = np.array(_indices([*map(composed, names)], map(composed, self.names)), np.int64)
        return replace(self, names=tuple(names), indices=order[self.indices], listed=True)

    def describe(self) -> str:
        """Return a text such as '12 classes (a, b, c, d, e and 7 more; labels split at ';')'."""
        reading = f"; {self.reading}" if self.reading else ""
        return f"{len(self.names)} classes ({listed(self.names, _SHOWN)}{reading})"


def encode(raw: RawLabels, like: Labels | None = None) -> Labels:
    """Return the labels that a source states, as indices of classes.

    Classes are those that the source lists, in its order. Otherwise they are the labels that occur,
    numbers by value and texts sorted; or the classes of `like`, the training split, whose labels
    are read in the same way. DataError is raised if a label is unknown. A warning names classes
    that look alike.
    """
    where, reading = raw.where, raw.reading
    classes = None if raw.classes is None else [*map(composed, raw.classes)]
    numbers = all(isinstance(value, int) for value in raw.values)
    if classes is not None:
        check_unique(classes, "class", where)
    elif numbers and raw.lengths is not None:
        values = np.array(raw.values, np.int64)[raw.codes]
        # Lists of one length above 1, with 0 and 1 alone, have an entry for each class.
        equal = raw.lengths[0] > 1 and (raw.lengths == raw.lengths[0]).all()
        hot = equal and values.min() >= 0 and values.max() <= 1
        reading = like.reading if like else HOT if hot else IDS
        if reading == HOT:
            return _encode_hot(raw, values, like)
    if numbers:
        low, top = (int(limit(raw.values, default=0)) for limit in (min, max))
        last = top if classes is None else len(classes) - 1
        if low < 0 or top > last:
            raise DataError(
                f"expected labels from 0 to {last} in {where}, got labels from {low} to {top}: is "
                "it a split without labels?"
            )
    if numbers and classes is not None:
        names, order = classes, raw.values
    else:
        texts = _spelled(raw)
        occurring = sorted(set(texts))
        if all(map(str.isdecimal, occurring)):
            occurring.sort(key=int)
        names = classes or (like.names if like else occurring)
        if unknown := sorted({*occurring} - {*names}):
            raise DataError(
                f"{where} has labels that are not in {CLASSES_FILE}: {listed(unknown, _SHOWN)}"
                if classes
                else f"expected only labels in {where} that images to train on have (such as "
                f"{listed(names, 10)}), got also {listed(unknown, 10)}: leave out these images, "
                "list all classes, or name another column by --label-column"
            )
        order = _indices(names, texts)
    indices = np.array(order, np.int64)[raw.codes]
    ends = None if raw.lengths is None else raw.lengths.cumsum()
    if raw.lengths is not None and raw.lengths.max(initial=0) > 1:
        keys = np.repeat(np.arange(len(raw.lengths)), raw.lengths) * len(names) + indices
        keys.sort()
        if len(again := keys[1:][keys[1:] == keys[:-1]]):
            raise DataError(
                f"expected every class of an image once in {where}, got one twice in row "
                f"{again[0] // len(names)}: lists name classes, or have 0 or 1 for each class of a "
                "type that is not ClassLabel"
            )
    if like is None:
        _warn_of_alike(names, where)
    return Labels(tuple(names), indices, ends, classes is not None, reading)


def _encode_hot(raw: RawLabels, values: np.ndarray, like: Labels | None) -> Labels:
    assert raw.lengths is not None
    count = int(raw.lengths[0]) if like is None else len(like.names)
    if (raw.lengths != count).any() or not ((values == 0) | (values == 1)).all():
        raise DataError(
            f"expected lists of {count} numbers 0 or 1 in {raw.where}, as the images to train on"
            f" have, got others: write the classes of both splits in one way"
        )
    hot = values.reshape(-1, count) == 1
    names = tuple(map(str, range(count)))
    return Labels(names, hot.nonzero()[1], hot.sum(1).cumsum(), reading=HOT)


def _spelled(raw: RawLabels) -> list[str]:
    """Return each value as a class's name; numbers have no fraction of 0, as pandas writes some."""
    texts, known = [composed(str(value)) for value in raw.values], set(raw.classes or ())
    spellings = defaultdict[Decimal, set[str]](set)
    for text in {*texts} - known:
        if re.fullmatch(r"[+-]?\d+(\.\d*)?", text):
            spellings[Decimal(text)].add(text)
    if twice := [text for each in spellings.values() if len(each) > 1 for text in sorted(each)]:
        raise DataError(
            f"expected one spelling of each number in {raw.where}, got {listed(twice, _SHOWN)}: "
            "write the labels of a class alike"
        )
    others = sorted({*texts}.difference(known, *spellings.values()))
    if spellings and others and _MISSING.issuperset(others):
        raise DataError(
            f"expected a number for each label in {raw.where}, got {listed(others)}: give these"
            " images a label, or leave them out"
        )
    if all(re.fullmatch(r"\d+\.0", text) for text in texts):
        texts = [text if text in known else text.removesuffix(".0") for text in texts]
    return texts


def _warn_of_alike(names: Sequence[str], where: str) -> None:
    """Name classes that differ only in case, width, spaces or invisible characters."""
    alike = defaultdict[str, list[str]](list)
    for name in names:
        text = unicodedata.normalize("NFKC", name).casefold()
        alike["".join(c for c in text if unicodedata.category(c)[0] not in "CZ")].append(name)
    groups = [" and ".join(map(repr, each)) for each in alike.values() if len(each) > 1]
    if groups and os.environ.get("RANK", "0") == "0":
        text = f"classes look alike: {listed(groups, _SHOWN)}: if they are one class, write its"
        logger.warning("%s: %s name alike", where, text)


# -- names of classes -------------------------------------------------------------------------


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), because macOS decomposes names of files."""
    return unicodedata.normalize("NFC", name)


def read_names(path: str | Path) -> list[str]:
    """Read a file with a name of a class in each line, such as timm's `--class-map`.

    DataError is raised if the file cannot be read, or has a name twice or no name.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the classes in {path}: {error}") from error
    names = [composed(name) for line in lines if (name := line.strip())]
    check_unique(names, "class", path)
    if not names:
        raise DataError(f"{path}: expected a name of a class in each line, got no name")
    return names


def check_unique(values: Iterable[object], what: str, path: str | Path) -> None:
    """Raise DataError if the file at `path` has a value twice."""
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise DataError(f"{path}: expected every {what} once, got {listed(repeated, _SHOWN)} twice")


def class_map(path: str | None) -> tuple[str, ...] | None:
    """Return the names in the file of `--class-map`, or None without this option."""
    return None if path is None else tuple(read_names(path))


# -- labels and outputs -----------------------------------------------------------------------


class Match(NamedTuple):
    """How the classes of a data set and the outputs of a model belong together."""

    names: tuple[str, ...]  # the data's classes, with the outputs' names if labels are numbers
    outputs: tuple[str, ...] | None  # names of all outputs; None: the data's classes, in order
    order: list[int] | None = None  # output of each class of the data; None: class i is output i
    new_head: str | None = None  # why the model needs a new head, as the classes differ


def match(
    names: Sequence[str],
    outputs: Sequence[str] | int,
    policy: Literal["new head", "same", "outputs"],
    *,
    numbered: bool = False,
    whole: bool = False,
) -> Match:
    """Match the classes of a data set, in the order of its labels, to the outputs of a model.

    Outputs are their names, which are matched by name, or their number, if only the order of both
    can tell. The policy decides about other classes. In training, a "new head" is for other
    classes. A teacher needs the "same" classes. In evaluation, labels are "outputs": the data may
    lack some, and numbers are those of the outputs, if `numbered` (no list of classes exists) even
    without names. `whole` data have an entry for each class in each label, so that numbers of fewer
    classes are an error.

    Raises:
        ConfigError: the classes differ, or outputs without names may be in either of two orders.
    """
    names = tuple(map(composed, names))
    trained = None if isinstance(outputs, int) else tuple(map(composed, outputs))
    count = outputs if isinstance(outputs, int) else len(outputs)
    if policy == "outputs":
        if trained is None and numbered:
            trained = tuple(map(str, range(count)))
        if trained and not (whole and len(names) < count):
            names = _name_numbers(trained, names)
            if set(names) < set(trained):
                return Match(names, trained, _indices(trained, names))
    if reason := _mismatch(trained, count, names):
        if policy == "new head":
            return Match(names, None, new_head=reason)
        if policy == "outputs" and trained and not whole:
            extra = listed(sorted(set(names) - set(trained)), _SHOWN)
            raise ConfigError(
                f"expected only classes that the weights have ({listed(trained, _SHOWN)}), but the"
                f" data also have {extra}: rename or leave out these"
            )
        raise ConfigError(f"{reason}: expected the same classes")
    if trained is None:
        _check_one_order(names)
        return Match(names, None)
    order = _indices(trained, names)
    return Match(names, trained, None if order == sorted(order) else order)


def _indices(names: Sequence[str], chosen: Iterable[str]) -> list[int]:
    index = {name: number for number, name in enumerate(names)}
    return [index[name] for name in chosen]


def _mismatch(trained: Sequence[str] | None, outputs: int, names: Sequence[str]) -> str | None:
    """Return how the classes differ, order aside, or None."""
    if len(names) != outputs:
        shown = listed(names, _SHOWN)
        return f"the weights have {outputs} classes, the data {len(names)} ({shown})"
    if trained is None or not (missing := set(names) - set(trained)):
        return None
    if _are_numbers_of(trained, names):
        return (
            f"the labels of the data are numbers, those of the weights names ({listed(trained, 5)};"
            " --class-map FILE names the numbers)"
        )
    return (
        "the classes of the weights and of the data differ: only the weights have"
        f" {listed(sorted(set(trained) - set(names)), 5)}; only the data have"
        f" {listed(sorted(missing), 5)}"
    )


def _are_numbers_of(trained: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the data's `names` are all numbers, and are no names of `trained` classes."""
    if not set(names).isdisjoint(trained) or all(map(str.isdecimal, trained)):
        return False
    return all(map(str.isdecimal, names))


def _name_numbers(trained: Sequence[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the outputs whose numbers `names` are; other names are returned."""
    numbers = [int(name) for name in names] if _are_numbers_of(trained, names) else []
    if len(set(numbers)) < len(names) or max(numbers) >= len(trained):
        return names
    return tuple(trained[number] for number in numbers)


def _check_one_order(names: Sequence[str]) -> None:
    """Raise ConfigError if `names` are sorted as strings, and timm would sort them otherwise."""
    natural = sorted(names, key=_natural_key)
    ties = any(_natural_key(a) == _natural_key(b) for a, b in pairwise(natural))
    if list(names) == sorted(names) and (ties or natural != list(names)):
        raise ConfigError(
            f"the weights have no names of classes, and their {len(names)} outputs may be in"
            f" either order: {listed(names, 12)} (sorted as here and in torchvision), or"
            f" {listed(natural, 12)} (sorted as in timm): name them by --class-map FILE, a name"
            " in each line, in the order of the outputs"
        )


def _natural_key(name: str) -> list[int | str]:
    """Return the key by which timm sorts class folders: numbers by value, letters without case."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())]
