"""Values that a type refuses, with their messages; each room tests the types of its settings."""

import dataclasses
from collections.abc import Callable
from math import inf, nan
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest

from tresnet.engine.config import TrainConfig
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.errors import ConfigError, InputError
from tresnet.layers.norm import NORMS
from tresnet.measure import settings as benchmarks
from tresnet.memory.plan import MemoryPlan
from tresnet.models import heads
from tresnet.settings import TrainingBuild, fields
from tresnet.settings.fields import Ascending, Settings
from tresnet.settings.model import Head, ModelConfig, ModelOptions

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
        ({"count": "3"}, "--count: expected a valid integer, got '3'"),
        ({"count": True}, "--count: expected a valid integer, got True"),
        ({"count": 2.5}, "--count: expected a valid integer, got 2.5"),
        ({"size": 2**31}, "--size: expected at most 2147483647 or 'auto', got 2147483648"),
        ({"count_or_zero": -1}, "--count-or-zero: expected at least 0, got -1"),
        ({"positive": 0.0}, "--positive: expected greater than 0, got 0.0"),
        ({"positive": nan}, "--positive: expected a finite number, got nan"),
        ({"positive": inf}, "--positive: expected a finite number, got inf"),
        ({"positive": True}, "--positive: expected a valid number, got True"),
        ({"positive_or_zero": -0.5}, "--positive-or-zero: expected at least 0, got -0.5"),
        ({"positive_or_zero": None}, "--positive-or-zero: expected a valid number, got None"),
        ({"fraction": 1.5}, "--fraction: expected at most 1, got 1.5"),
        ({"fraction_below_1": 1}, "--fraction-below-1: expected less than 1, got 1"),
        ({"flag": 1}, "--flag: expected a valid boolean, got 1"),
        ({"choice": "x"}, "--choice: expected 'off' or 'on', got 'x'"),
        ({"name": 3}, "--name: expected a valid string, got 3"),
        ({"made_by": 3}, "--made-by: expected callable or a valid string, got 3"),
        ({"inner": Inner(pair=(1.0, 0.5))}, "--pair: expected the smallest value first, got"),
        ({"inner": Inner(pair=(0.0, 0.5))}, "--pair: expected greater than 0, got 0.0"),
        ({"inner": Inner(pair=(0.5,))}, "--pair: expected more values, got (0.5,)"),
        ({"inner": Inner(layers=(1, "2"))}, "--layers: expected a valid integer, got '2'"),
        ({"count": 0, "flag": 1}, "--count: expected at least 1, got 0\n  --flag: expected a v"),
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


def every_field(cls):
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from every_field(field.type)
        else:
            yield field.name, field.type


@pytest.mark.parametrize("cls", EVERY)
def test_every_number_has_a_range(cls):
    """Allow no number without a range except gpu_memory, which is checked where it is used."""
    bare = {
        name
        for name, kind in every_field(cls)
        if not hasattr(kind, "__metadata__") and {int, float} & {kind, *get_args(kind)}
    }
    assert bare <= {"gpu_memory"}


def test_choices_are_those_of_the_registries():
    """Settings spell out what registries hold."""
    assert {*get_args(get_type_hints(TrainingBuild)["norm"])} == {*NORMS}
    assert {*get_args(Head)} == {*heads._HEADS}


def test_each_field_of_a_model_is_a_typed_keyword_of_create():
    fields_of_model = {field.name for field in dataclasses.fields(ModelConfig)}
    assert ModelOptions.__annotations__.keys() == fields_of_model - {"variant", "bottlenecks"}
