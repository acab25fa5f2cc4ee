"""Builds dataclasses from plain values, and says which value does not fit its field and why.

Libraries were tried for this: msgspec passes over unknown fields of dataclasses and does not name
the choices of a Literal; dacite takes True for an int, leaves an int where a float is meant, and
calls a wrong choice "Literal"; cattrs needs a hook for `int | Literal["auto"]`. None suggests the
nearest name, and what would have to be built around them is longer than this.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from tresnet.errors import ConfigError

T = TypeVar("T")

_UNIONS = (
    types.UnionType,
    typing.Union,
)  # `int | None` is the one, `Literal[...] | None` the other
_MISFIT = object()


def build(cls: type[T], values: object, source: str, path: str = "") -> T:
    """An instance of the dataclass `cls` from nested dicts; absent fields keep their defaults.

    Args:
        cls: A dataclass whose fields are dataclasses or plain values.
        values: What JSON gave.
        source: Where it came from, for error messages.
        path: The group within the source, for error messages.

    Raises:
        ConfigError: Not a dict, an unknown field, or a value of another type.
    """
    if not isinstance(values, dict):
        where = f"{path} of {source}" if path else source
        raise ConfigError(f"expected {where} to be an object with fields, got {values!r}")
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in hints:
            raise ConfigError(f"{source}: {unknown('field', full, _full_names(hints, path))}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[name] = build(hint, value, source, full)
        else:
            arguments[name] = coerce(value, hint, f"{source}: {full}")
    return cls(**arguments)


def coerce(value: object, hint: object, what: str) -> Any:
    """`value` as the type `hint`: lists become tuples and ints floats; nothing else is converted.

    Raises:
        ConfigError: The value is of another type.
    """
    fitted = _fit(value, hint)
    if fitted is _MISFIT:
        raise ConfigError(f"{what}: expected {describe(hint)}, got {value!r}")
    return fitted


def describe(hint: object) -> str:
    """A type hint in words a user reads, such as `int or None` or `one of off, bf16, fp16`."""
    if typing.get_origin(hint) is Literal:
        choices = ", ".join(str(choice) for choice in typing.get_args(hint))
        return f"one of {choices}" if len(typing.get_args(hint)) > 1 else choices
    if typing.get_origin(hint) in _UNIONS:
        return " or ".join(describe(part) for part in typing.get_args(hint))
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown KIND 'NAME'`, with the nearest known name, or all of them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    return f"unknown {kind} {name!r}: {hint}"


def option(name: str) -> str:
    """The command line's spelling of a field: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def _fit(value: object, hint: object) -> object:
    if typing.get_origin(hint) in _UNIONS:
        fits = (_fit(value, part) for part in typing.get_args(hint))
        return next((fitted for fitted in fits if fitted is not _MISFIT), _MISFIT)
    if typing.get_origin(hint) is Literal:
        return value if value in typing.get_args(hint) else _MISFIT
    if typing.get_origin(hint) is tuple:
        return _fit_tuple(value, typing.get_args(hint))
    if hint is types.NoneType:
        return None if value is None else _MISFIT
    if isinstance(value, bool) is not (hint is bool):
        return _MISFIT
    if hint is float and isinstance(value, int):
        return float(value)
    return value if isinstance(hint, type) and isinstance(value, hint) else _MISFIT


def _fit_tuple(value: object, parts: tuple[object, ...]) -> object:
    if not isinstance(value, list | tuple):
        return _MISFIT
    hints = [parts[0]] * len(value) if Ellipsis in parts else list(parts)
    if len(hints) != len(value):
        return _MISFIT
    fitted = tuple(_fit(item, hint) for item, hint in zip(value, hints, strict=True))
    return _MISFIT if _MISFIT in fitted else fitted


def _full_names(hints: dict[str, object], path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name in hints]
