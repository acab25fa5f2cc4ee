"""Check settings by pydantic against the types of their fields, which hold the ranges.

`check` checks an instance, `read` reads JSON, and `parse` reads strings of the command line. Each
turns pydantic's errors into one line per value, in the style of this package's errors. pydantic is
imported at the first check, so that importing the package stays quick.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, Lt, Predicate

from tresnet.errors import ConfigError, InputError, TResNetError, unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(1), Le(2**31 - 1)]  # PyTorch counts images and pixels in 32 bits
CountOrZero = Annotated[int, Ge(0)]
# Kernels multiply settings in float32. The bound 1e15 keeps products below float32's maximum.
Positive = Annotated[float, Gt(0), Le(1e15)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e15)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionAbove0 = Annotated[float, Gt(0), Le(1)]
FractionBelow1 = Annotated[float, Ge(0), Lt(1)]


def smallest_first(values: tuple[float, float]) -> bool:
    """Return whether the first value of a range is at most the second."""
    return values[0] <= values[1]


Ascending = Predicate(smallest_first)


REVALIDATED: Any = {"revalidate_instances": "always"}  # pydantic validates existing instances again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings; pydantic validates instances again, and rejects NaN and infinity."""

    __pydantic_config__: ClassVar = {
        "allow_inf_nan": False,
        "arbitrary_types_allowed": True,
        "extra": "forbid",
        **REVALIDATED,
    }

    def values(self, of: "type[Settings]") -> dict[str, Any]:
        """Return name and value of each field that the base class `of` has."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(of)}


def check(
    settings: Settings,
    error: type[TResNetError] = ConfigError,
    spell: Callable[[str], str] | None = None,
) -> None:
    """Raise `error` with a line (`--lr: expected more than 0, got -1.0`) for each bad value.

    Nested dataclasses are checked too. `spell` (default: `option`) spells field names in messages.
    """
    cls = type(settings)
    with _explained(cls, error, lambda path: (spell or option)(path[-1])):
        _adapter(cls).validate_python(settings, strict=True)


def read(cls: type[T], text: str, source: str) -> T:
    """Return an instance of `cls` from JSON; bad JSON raises ConfigError, which names `source`.

    Missing fields get their defaults, lists become tuples, and whole numbers may stand for floats.
    """
    try:
        values = json.loads(text)  # accepts lone surrogates in paths, unlike pydantic's reader
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    with _explained(cls, ConfigError, lambda path: ": ".join([source, *path])):
        made = _adapter(cls).validate_python(values)  # raises for unknown or misplaced fields
        return _adapter(cls).validate_python(_unconverted(made, values), strict=True)


def _unconverted(made: Any, value: Any) -> Any:
    """Return `made` with the fields of the JSON `value`, because pydantic may turn "3" into 3."""
    if isinstance(value, dict):
        changes = {name: _unconverted(getattr(made, name), own) for name, own in value.items()}
        return dataclasses.replace(made, **changes)
    return tuple(value) if isinstance(value, list) else value


def checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a checked instance of a `REVALIDATED` dataclass, or raise TypeError or ValueError."""
    return _adapter(cls).validate_python(cls(**values), strict=True)


def parse(cls: type[T], texts: Mapping[str, str], source: str) -> T:
    """Return an instance of `cls`; a bad text raises InputError, which names `source`."""
    with _explained(cls, InputError, lambda path: ": ".join([source, *path])):
        return _adapter(cls).validate_strings(dict(texts))


def option(name: str) -> str:
    """Return a field's command-line option: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


@functools.cache
def _adapter(cls: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


# Descriptions of expected values. A key is an error type of pydantic, or that type's first word.
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
    """Turn pydantic's errors into one `error`; each line is `NAME: expected ..., got ...`."""
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
            if kind == "predicate_failed":  # the message quotes the predicate's name
                expected = expected.split("'")[1].replace("_", " ")
            elif template is not None:
                context = {key: _plain(value) for key, value in one.get("ctx", {}).items()}
                expected = template.format(**context)
            key = spell(path), repr(one["input"])
            found.setdefault(key, []).append(expected)  # a union has one error for each type
        lines = [
            f"{name}: expected {' or '.join(dict.fromkeys(kinds))}, got {got}"
            for (name, got), kinds in found.items()
        ]
        raise error("\n  ".join(lines)) from None


def _path(cls: type, place: tuple[int | str, ...]) -> tuple[tuple[str, ...], Iterable[str]]:
    """Return the path to a field, and all fields of the dataclass that contains it.

    `place` is the `loc` of pydantic's error; it may continue inside the field.
    """
    path: list[str] = []
    known: dict[str, Any] = {}
    for part in map(str, place):
        path.append(part)
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        kind = known.get(part)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            break
        cls = kind
    return tuple(path), known


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
