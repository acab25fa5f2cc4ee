"""Match the names of a data set's classes to the outputs of a model.

A label is an index into the data set's classes. Its output has the same name where weights have
names of classes. Without names, label i is output i, unless trainers sort the names in two ways.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from tresnet.errors import ConfigError, DataError, listed
from tresnet.settings import ClassMap

_SHOWN = 5


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


def class_map(data: ClassMap) -> tuple[str, ...] | None:
    """Return the names in the file of `--class-map`, or None without this option."""
    return None if data.class_map is None else tuple(read_names(data.class_map))


def class_mismatch(trained: Sequence[str] | None, outputs: int, names: Sequence[str]) -> str | None:
    """Return how the classes differ (order aside), or None; `output_order` has the arguments."""
    if len(names) != outputs:
        return f"the weights have {outputs} classes, the data {len(names)} ({listed(names, 5)})"
    trained_names = {composed(name) for name in trained or names}
    if not (missing := set(names) - trained_names):
        return None
    if trained and numbers_for_names(trained, names):
        return (
            f"the labels of the data are numbers, those of the weights names ({listed(trained, 5)};"
            " --class-map FILE names the numbers)"
        )
    return (
        "the classes of the weights and of the data differ: only the weights have"
        f" {listed(sorted(trained_names - set(names)), 5)}; only the data have"
        f" {listed(sorted(missing), 5)}"
    )


def output_order(
    trained: Sequence[str] | None,
    outputs: int,
    names: Sequence[str],
    subset: bool = False,
) -> list[int] | None:
    """Return the model's output index for each label of the data, or None if label i is output i.

    `trained` are the classes of the model's outputs in order, or None if unknown. `names` are the
    data's classes in the order of labels, as `composed` returns them. Differences other than order
    raise `ConfigError`, but with `subset` the data may have fewer classes (as ImageNet-R).
    """
    indices = {composed(name): index for index, name in enumerate(trained or ())}
    if subset and set(names) < indices.keys():
        return [indices[name] for name in names]
    if reason := class_mismatch(trained, outputs, names):
        if subset and trained is not None:
            unknown = listed(sorted(set(names) - indices.keys()), 5)
            raise ConfigError(
                f"expected only classes that the weights have ({listed(trained, 5)}), but the"
                f" data also have {unknown}: rename or leave out these"
            )
        raise ConfigError(f"{reason}: expected the same classes")
    if trained is None:
        _check_one_order(names)
        return None
    order = [indices[name] for name in names]
    return None if order == sorted(order) else order


def numbers_for_names(trained: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the data's `names` are all numbers, and are no names of `trained` classes."""
    if not set(names).isdisjoint(trained) or all(map(str.isdecimal, trained)):
        return False
    return all(map(str.isdecimal, names))


def name_numbers(trained: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names of the outputs whose numbers are `names`.

    `names` are returned unless they are all numbers of different outputs, which have names.
    """
    numbers = [int(name) for name in names] if numbers_for_names(trained, names) else []
    if len(set(numbers)) < len(names) or max(numbers) >= len(trained):
        return list(names)
    return [composed(trained[number]) for number in numbers]


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
