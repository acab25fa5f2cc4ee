"""Settings: frozen dataclasses, nested by what reads them, whose fields have flat names outside.

The command line, records and `config.json` know a field by its name alone, so no two fields of
nested settings share a name. `flatten` and `replace` translate. `check` validates with pydantic: a
field's type, such as `Count`, states the allowed range. pydantic is imported at the first check, so
that importing the package stays quick.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, Predicate

from tresnet.errors import ConfigError, InputError, TResNetError, check_known, unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
S = TypeVar("S", bound="Settings")

Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(1), Le(2**31 - 1)]  # PyTorch may index images and pixels in 32 bits
JpegQuality = Annotated[int, Ge(1), Le(100)]
CountOrZero = Annotated[int, Ge(0)]
# With the bound 1e15, the product of two settings stays below float32's maximum in kernels.
Positive = Annotated[float, Gt(0), Le(1e15)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e15)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionAbove0 = Annotated[float, Gt(0), Le(1)]
FractionBelow1 = Annotated[float, Ge(0), Lt(1)]


def smallest_first(values: tuple[float, float]) -> bool:
    """Return whether the first value of a range is at most the second."""
    return values[0] <= values[1]


def parse_size(size: str | int) -> int:
    """Convert a size (`80GiB`, `24GB` = 24 * 10^9, or an int) to bytes, or raise InputError."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    n_bytes = -1
    if not isinstance(size, bool) and not (isinstance(size, str) and size.strip()[-1:].isdigit()):
        with contextlib.suppress(ValidationError, OverflowError):
            n_bytes = TypeAdapter(ByteSize).validate_python(size)
    if not 0 < n_bytes < 2**63:
        raise InputError(f"{_SIZE}, got {size!r}")
    return int(n_bytes)


def is_size(size: str) -> bool:
    """Return whether `parse_size` accepts a size in bytes."""
    with contextlib.suppress(InputError):
        return parse_size(size) > 0
    return False


Ascending = Predicate(smallest_first)
MemorySize = Annotated[str, Predicate(is_size)]  # such as 80GiB
_SIZE = "expected a size such as '80GiB' or '512MiB', with its unit"
REVALIDATED: Any = {"revalidate_instances": "always"}  # pydantic validates existing instances again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings. pydantic rejects NaN, infinity and unknown fields."""

    __pydantic_config__: ClassVar[Any] = {
        "allow_inf_nan": False,
        "arbitrary_types_allowed": True,
        "extra": "forbid",
        **REVALIDATED,
    }


def flatten(settings: Settings) -> dict[str, Any]:
    """Return the values of all fields by name, those of nested settings in their place."""
    flat: dict[str, Any] = {}
    for name, value in vars(settings).items():
        flat |= flatten(value) if isinstance(value, Settings) else {name: value}
    return flat


def changed(settings: S, default: S) -> dict[str, Any]:
    """Return the fields, by name, whose values differ from those of `default`."""
    before = flatten(default)
    return {name: value for name, value in flatten(settings).items() if value != before[name]}


def replace(settings: S, /, **changes: object) -> S:
    """Return a copy with fields changed by name, also fields of nested settings.

    `replace(TrainConfig(), lr=0.1)` changes `step.optim.lr`. ConfigError: no field has the name.
    """
    names = flatten(settings)
    result = _replaced(settings, changes)
    for name in changes:
        check_known("option", name, names, ConfigError)
    return result


def _replaced(settings: S, changes: Mapping[str, object]) -> S:
    values = {
        name: _replaced(value, changes) if isinstance(value, Settings) else changes.get(name, value)
        for name, value in vars(settings).items()
    }
    return type(settings)(**values)


def check(
    settings: T,
    error: type[TResNetError] = ConfigError,
    spell: Callable[[str], str] | None = None,
) -> T:
    """Check `settings`, and return a copy in which integers in float fields are floats.

    Bad values raise `error` with a line each: `--lr: expected greater than 0, got -1.0`. Nested
    dataclasses are checked too. `spell` (default: `option`) formats field names for messages.
    """
    with _listing(type(settings), error, spell or option):
        return _adapter(type(settings)).validate_python(settings, strict=True)


def deferred(function: Callable[..., T]) -> Callable[..., "functools.partial[T]"]:
    """Return a function with the same parameters that returns the call to make."""
    later = lambda *args, **options: functools.partial(function, *args, **options)  # noqa: E731
    return functools.wraps(function)(later)


def check_call(call: "functools.partial[T]") -> "functools.partial[T]":
    """Check a call's arguments by the types of the parameters, as `check`; raise InputError."""
    from pydantic import TypeAdapter
    from pydantic_core import ArgsKwargs

    function: Any = deferred(call.func)  # pydantic calls it
    adapter = TypeAdapter(function, config=Settings.__pydantic_config__)
    with _listing(call.func, InputError, option):
        return adapter.validate_python(ArgsKwargs(call.args, call.keywords), strict=True)


def parse(cls: type[S], texts: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return the values that `texts` give for fields of `cls`, by the fields' names.

    An unknown name or an invalid text raises an InputError that names `source`.
    """
    names = flatten(cls())
    for name in texts.keys() - names.keys():
        raise InputError(f"{source}: {unknown('setting', name, names)}")
    with _listing(cls, InputError, lambda name: f"{source}: {name}"):
        parsed = flatten(_adapter(cls).validate_strings(_nested(cls, texts)))
    return {name: parsed[name] for name in texts}


def _nested(cls: type[Settings], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `flat` that are fields of `cls`, in dicts for nested settings."""
    nested: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and issubclass(field.type, Settings):
            nested[field.name] = _nested(field.type, flat)
        elif field.name in flat:
            nested[field.name] = flat[field.name]
    return nested


def option(name: str) -> str:
    """Return a field's command-line option: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


@functools.cache
def _adapter(cls: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


# Replacements in pydantic's messages
_WORDS = {
    "Input should be ": "expected ",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Field required": "expected more values",
    "Predicate 'smallest_first' failed": "expected the smallest value first",
    "Predicate 'is_size' failed": _SIZE,
}


@contextlib.contextmanager
def _listing(
    cls: Callable[..., Any], error: type[TResNetError], spell: Callable[[str], str]
) -> Iterator[None]:
    """Replace a ValidationError in the `with` block by `error`, with a line for each bad field."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as invalid:
        problems: dict[tuple[str, str], list[str]] = {}
        for detail in invalid.errors(include_url=False):
            text = detail["msg"]
            for phrase, ours in _WORDS.items():
                text = text.replace(phrase, ours)
            name = spell(_field_name(cls, detail["loc"]))
            # pydantic reports an error for each type of a union, so a field's errors are joined.
            problems.setdefault((name, repr(detail["input"])), []).append(text)
        lines = []
        for (name, value), texts in problems.items():
            if any(text.startswith("expected at ") for text in texts):
                # a number out of range is not meant as the name of a file
                texts = [text for text in texts if "valid string" not in text]
            expected = " or ".join(dict.fromkeys(texts)).replace(" or expected", " or")
            lines.append(f"{name}: {expected}, got {value}")
        raise error("\n  ".join(lines)) from None


def _field_name(cls: Any, location: Sequence[int | str]) -> str:
    """Return the name of the innermost field in the `loc` of pydantic's error."""
    name = ""
    for name in map(str, location):
        cls = get_type_hints(cls)[name]
        if not dataclasses.is_dataclass(cls):
            break
    return name
