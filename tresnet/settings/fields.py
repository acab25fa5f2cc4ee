"""Checks of settings: a field's type holds its range, and pydantic checks values against it.

`check`, `read` and `parse` check an instance, JSON and texts of the command line. Each turns
pydantic's errors into one line per value, in the words of the other errors. pydantic is imported at
the first check, so that importing the package stays quick.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, Lt, Predicate

from tresnet.errors import ConfigError, InputError, TResNetError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(1), Le(2**31 - 1)]  # PyTorch counts images and pixels in 32 bits
CountOrZero = Annotated[int, Ge(0)]
# Far below the largest of float32: kernels take such numbers, and products of them, as float32.
Positive = Annotated[float, Gt(0), Le(1e15)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e15)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionAbove0 = Annotated[float, Gt(0), Le(1)]
FractionBelow1 = Annotated[float, Ge(0), Lt(1)]


def smallest_first(values: tuple[float, float]) -> bool:
    """Return whether the first value of a range is not larger than the second."""
    return values[0] <= values[1]


Ascending = Predicate(smallest_first)


REVALIDATED: Any = {"revalidate_instances": "always"}  # for a class's `__pydantic_config__`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the settings: NaN and infinity are in no range, and instances are checked."""

    __pydantic_config__: ClassVar = {
        "allow_inf_nan": False,
        "arbitrary_types_allowed": True,
        "extra": "forbid",
        **REVALIDATED,
    }

    def values(self, of: "type[Settings]") -> dict[str, Any]:
        """Return the fields that the base class `of` declares, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(of)}


def check(
    settings: Settings,
    error: type[TResNetError] = ConfigError,
    spell: Callable[[str], str] | None = None,
) -> None:
    """Raise `error` with a line (`--lr: expected more than 0, got -1.0`) for each bad value.

    Dataclasses in fields are checked too. `spell` names a field in the message; None for `option`.
    """
    cls = type(settings)
    with _explained(cls, error, lambda path: (spell or option)(path[-1])):
        _adapter(cls).validate_python(settings, strict=True)


def read(cls: type[T], text: str, source: str) -> T:
    """Return an instance of `cls` from JSON, or raise ConfigError with `source`.

    Absent fields keep their defaults, lists become tuples, and floats may be whole numbers.
    """
    try:
        values = json.loads(text)  # pydantic's own reader refuses lone surrogates in paths
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    with _explained(cls, ConfigError, lambda path: ": ".join([source, *path])):
        made = _adapter(cls).validate_python(values)  # refuses unknown and misplaced fields
        return _adapter(cls).validate_python(_unconverted(made, values), strict=True)


def _unconverted(made: Any, value: Any) -> Any:
    """Return the settings `made` from JSON with its own values, in which "3" is not a number."""
    if isinstance(value, dict):
        changes = {name: _unconverted(getattr(made, name), own) for name, own in value.items()}
        return dataclasses.replace(made, **changes)
    return tuple(value) if isinstance(value, list) else value


def checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance of a dataclass with `REVALIDATED`, or raise TypeError or ValueError."""
    return _adapter(cls).validate_python(cls(**values), strict=True)


def parse(cls: type[T], texts: Mapping[str, str], source: str) -> T:
    """Return an instance from texts of some fields, or raise InputError about `source`."""
    with _explained(cls, InputError, lambda path: ": ".join([source, *path])):
        return _adapter(cls).validate_strings(dict(texts))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `unknown KIND 'NAME'` with the nearest known name, or all names if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    return f"unknown {kind} {name!r}: {hint}"


def option(name: str) -> str:
    """Return a field's command-line option: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


@functools.cache
def _adapter(cls: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _kinds(cls: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(cls)}


# From pydantic's name of an error, or its first word, to what was expected.
_EXPECTED = {
    "bool": "true or false",
    "callable": "a function",
    "dataclass": "an object with fields",
    "finite_number": "a finite number",
    "float": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int": "a whole number",
    "is_instance_of": "a {class}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "missing": "more values",
    "sequence_str": "a Sequence",
    "string": "text",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} value",
    "tuple": "a list",
}


@contextlib.contextmanager
def _explained(
    cls: type, error: type[TResNetError], spell: Callable[[tuple[str, ...]], str]
) -> Iterator[None]:
    """Raise `error` for pydantic's errors: `NAME: expected ..., got ...` for each value."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as misfits:
        found: dict[tuple[str, str], list[str]] = {}
        for one in misfits.errors(include_url=False):
            kind, expected = one["type"], one["msg"]
            path, known = _path(cls, one["loc"])
            template = _EXPECTED.get(kind, _EXPECTED.get(kind.partition("_")[0]))
            if kind == "unexpected_keyword_argument":
                what = unknown("setting", path[-1], known)
                raise error(f"{spell(path[:-1])}: {what}") from None
            if kind == "predicate_failed":  # the predicate's name says what it requires
                expected = expected.split("'")[1].replace("_", " ")
            elif template is not None:
                context = {key: _plain(value) for key, value in one.get("ctx", {}).items()}
                expected = template.format(**context)
            key = spell(path), repr(one["input"])
            found.setdefault(key, []).append(expected)  # a union has an error for each kind
        lines = [
            f"{name}: expected {' or '.join(dict.fromkeys(kinds))}, got {got}"
            for (name, got), kinds in found.items()
        ]
        raise error("\n  ".join(lines)) from None


def _path(cls: type, place: tuple[int | str, ...]) -> tuple[tuple[str, ...], Iterable[str]]:
    """Return the fields of a location, without pydantic's types after them, and their siblings."""
    path: list[str] = []
    for part in map(str, place):
        path.append(part)
        kind = _kinds(cls).get(part)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            break
        cls = kind
    return tuple(path), _kinds(cls)


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
