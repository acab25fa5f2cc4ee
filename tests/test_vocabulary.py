"""Options that mean the same are offered the same: settings spell out what registries hold."""

import typing

from tresnet.layers.norm import NORMS
from tresnet.models.config import ModelConfig, ModelOptions
from tresnet.ops.dispatch import IMPLS
from tresnet.settings import TrainingBuild


def test_choices_are_those_of_the_registries():
    for name, held in {"norm": NORMS, "impl": IMPLS}.items():
        assert {*typing.get_args(typing.get_type_hints(TrainingBuild)[name])} == {*held}, name


def test_create_takes_the_fields_of_the_configuration():
    fields = ModelConfig.__dataclass_fields__.keys() - {"variant", "bottlenecks"}
    assert ModelOptions.__annotations__.keys() == fields
