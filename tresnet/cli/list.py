"""`tresnet list`: the models and their weights."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.errors import InputError


@dataclasses.dataclass(frozen=True)
class List:
    """List the models with their parameters, features and weights."""

    pattern: Annotated[Positional[str], arg(metavar="PATTERN")] = "*"
    """Shell pattern of the names to list, such as '*_l'."""

    def run(self, argv: list[str]) -> int:
        """Print one line per model."""
        from tresnet.checkpoints.published import list_weights
        from tresnet.measure.macs import count_parameters
        from tresnet.models.zoo import build, list_models

        names = list_models(self.pattern)
        if not names:
            raise InputError(
                f"expected a pattern that matches a model, got {self.pattern!r}: "
                f"known are {', '.join(list_models())}"
            )
        rows = []
        for name in names:
            model = build(name, device="meta")
            tags = ", ".join(list_weights(name)) or "-"
            rows.append([name, f"{count_parameters(model):,}", f"{model.num_features:,}", tags])
        say(format_table(["model", "parameters", "features", "weights"], rows))
        return 0
