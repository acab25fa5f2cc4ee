"""Options that mean the same are offered the same: settings spell out what registries hold."""

import typing

from tresnet.layers.norm import NORMS
from tresnet.models import heads
from tresnet.ops.dispatch import IMPLS
from tresnet.settings import TrainingBuild
from tresnet.settings.model import Head


def test_choices_are_those_of_the_registries():
    for name, held in {"norm": NORMS, "impl": IMPLS}.items():
        assert {*typing.get_args(typing.get_type_hints(TrainingBuild)[name])} == {*held}, name
    assert {*typing.get_args(Head)} == {*heads._HEADS}
