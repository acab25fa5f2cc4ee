import json
from pathlib import Path

import pytest

from tresnet.engine.recipes import RECIPES, recipe
from tresnet.engine.validate import validate
from tresnet.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.json"


def test_recipes_are_as_frozen():
    """After a change on purpose: `python -m tresnet.engine.recipes > tests/golden/recipes.json`."""
    now = {name: make().to_dict() for name, make in RECIPES.items()}
    assert now == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_itself(name):
    assert recipe(name).recipe == name


def test_digits_needs_nothing_else():
    validate(recipe("digits"))


def test_paper_needs_data_only():
    with pytest.raises(ConfigError) as error:
        validate(recipe("paper"))
    assert str(error.value).splitlines()[1:] == [
        "  --data: say what to train on: a directory with train/ and val/, or digits"
    ]
