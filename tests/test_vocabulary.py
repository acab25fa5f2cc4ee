"""Options that mean the same are offered the same: command lines spell out what registries hold."""

import typing

import pytest

from tresnet.cli.predict import Predict
from tresnet.engine.config import NetworkConfig as TrainedModel
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.fused import RECOMPUTE
from tresnet.layers.norm import NORMS
from tresnet.models.config import ModelConfig, ModelOptions
from tresnet.ops.dispatch import Impl

CHOICES = {"norm": set(NORMS), "impl": set(typing.get_args(Impl)), "recompute": set(RECOMPUTE)}


@pytest.mark.parametrize("options", [TrainedModel, EvalConfig, Predict])
def test_choices_are_those_of_the_registries(options):
    hints = typing.get_type_hints(options)
    for name in CHOICES.keys() & hints.keys():
        offered = {
            choice
            for part in (hints[name], *typing.get_args(hints[name]))
            if typing.get_origin(part) is typing.Literal
            for choice in typing.get_args(part)
        }
        assert offered == CHOICES[name], name


def test_create_takes_the_fields_of_the_configuration():
    fields = ModelConfig.__dataclass_fields__.keys() - {"variant", "bottlenecks"}
    assert ModelOptions.__annotations__.keys() == fields
