"""Values that a type refuses, with their messages; each room tests the types of its settings."""

import dataclasses
import json
from collections.abc import Callable
from math import inf, nan
from typing import Annotated, Any, Literal, get_args

import pytest

from tresnet.engine.config import TrainConfig
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.errors import ConfigError, InputError
from tresnet.measure import settings as benchmarks
from tresnet.memory.plan import MemoryPlan
from tresnet.settings import fields
from tresnet.settings.fields import Ascending, Settings

EVERY = [TrainConfig, EvalConfig, MemoryPlan, *benchmarks.RunSettings.__subclasses__()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    pair: Annotated[tuple[fields.FractionAbove0, float], Ascending] = (0.5, 1.0)
    layers: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Settings):
    count: fields.Count = 1
    size: fields.Size | Literal["auto"] = 1
    count_or_zero: fields.CountOrZero = 0
    positive: fields.Positive | None = None
    positive_or_zero: fields.PositiveOrZero = 0.0
    fraction: fields.Fraction = 1.0
    fraction_below_1: fields.FractionBelow1 = 0.0
    flag: bool = False
    choice: Literal["off", "on"] = "off"
    name: str | None = None
    made_by: Callable[[Any], Any] | str = "x"
    inner: Inner = dataclasses.field(default_factory=Inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "--count: expected at least 1, got 0"),
        ({"count": "3"}, "--count: expected a whole number, got '3'"),
        ({"count": True}, "--count: expected a whole number, got True"),
        ({"count": 2.5}, "--count: expected a whole number, got 2.5"),
        ({"size": 2**31}, "--size: expected at most 2147483647 or 'auto', got 2147483648"),
        ({"count_or_zero": -1}, "--count-or-zero: expected at least 0, got -1"),
        ({"positive": 0.0}, "--positive: expected more than 0, got 0.0"),
        ({"positive": nan}, "--positive: expected a finite number, got nan"),
        ({"positive": inf}, "--positive: expected a finite number, got inf"),
        ({"positive": True}, "--positive: expected a number, got True"),
        ({"positive_or_zero": -0.5}, "--positive-or-zero: expected at least 0, got -0.5"),
        ({"positive_or_zero": None}, "--positive-or-zero: expected a number, got None"),
        ({"fraction": 1.5}, "--fraction: expected at most 1, got 1.5"),
        ({"fraction_below_1": 1}, "--fraction-below-1: expected less than 1, got 1"),
        ({"flag": 1}, "--flag: expected true or false, got 1"),
        ({"choice": "x"}, "--choice: expected 'off' or 'on', got 'x'"),
        ({"name": 3}, "--name: expected text, got 3"),
        ({"made_by": 3}, "--made-by: expected a function or text, got 3"),
        ({"inner": Inner(pair=(1.0, 0.5))}, "--pair: expected smallest first, got (1.0, 0.5)"),
        ({"inner": Inner(pair=(0.0, 0.5))}, "--pair: expected more than 0, got 0.0"),
        ({"inner": Inner(pair=(0.5,))}, "--pair: expected more values, got (0.5,)"),
        ({"inner": Inner(layers=(1, "2"))}, "--layers: expected a whole number, got '2'"),
        ({"count": 0, "flag": 1}, "--count: expected at least 1, got 0\n  --flag: expected true"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(change, message):
    fields.check(Sample())
    with pytest.raises(ConfigError) as error:
        fields.check(Sample(**change))
    assert str(error.value).startswith(message)
    with pytest.raises(InputError) as error:
        fields.check(Sample(**change), InputError, spell=str)
    assert not str(error.value).startswith("--")


def test_json_gives_the_same_settings_back():
    """A name of a file may hold any bytes, and a whole number is a float where one is meant."""
    sample = Sample(name="\udcfc", positive=3.0, inner=Inner(layers=(1, 2)))
    text = json.dumps(dataclasses.asdict(sample))
    assert fields.read(Sample, text.replace("3.0", "3"), "x") == sample
    assert isinstance(fields.read(Sample, '{"positive": 3}', "x").positive, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x is not JSON"),
        ("[" * 9999, "x is not JSON"),
        ("[]", "x: expected an object with fields, got []"),
        ('{"inner": 3}', "x: inner: expected an object with fields, got 3"),
        ('{"cuont": 3}', "x: unknown setting 'cuont': did you mean 'count'?"),
        (
            '{"inner": {"zzzzzz": 3}}',
            "unknown setting 'zzzzzz': expected one of layers, pair",
        ),
        ('{"inner": {"layers": [1, "2"]}}', "x: inner: layers: expected a whole number, got '2'"),
        ('{"count": "3"}', "x: count: expected a whole number, got '3'"),
        ('{"positive": true}', "x: positive: expected a number, got True"),
        ('{"inner": {"layers": 3}}', "x: inner: layers: expected a list, got 3"),
        ('{"positive": NaN}', "x: positive: expected a finite number, got nan"),
    ],
)
def test_json_that_does_not_fit_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        fields.read(Sample, text, "x")
    assert message in str(error.value)


def every_field(cls):
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from every_field(field.type)
        else:
            yield field.name, field.type


@pytest.mark.parametrize("cls", EVERY)
def test_every_number_has_a_range(cls):
    """But for one that is checked where it is used."""
    bare = {
        name
        for name, kind in every_field(cls)
        if not hasattr(kind, "__metadata__") and {int, float} & {kind, *get_args(kind)}
    }
    assert bare <= {"gpu_memory"}
