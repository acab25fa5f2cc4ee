"""`tresnet list` and `tresnet info`: show models, their weights, configuration and cost."""

import dataclasses
import os
from typing import Annotated, Any

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.errors import InputError, listed
from tresnet.settings import InputSize, sides
from tresnet.settings.fields import Settings


@dataclasses.dataclass(frozen=True)
class List:
    """List the models with their parameters, features and weights."""

    pattern: Annotated[Positional[str], arg(metavar="PATTERN")] = "*"
    """Shell pattern of the models' names, such as '*_l'."""

    def run(self, argv: list[str]) -> int:
        from tresnet.checkpoints.locate import list_weights
        from tresnet.measure.macs import count_parameters
        from tresnet.models.zoo import build, list_models

        names = list_models(self.pattern)
        if not names:
            raise InputError(
                f"expected a pattern that matches a model, got {self.pattern!r}: "
                f"known are {listed(list_models())}"
            )
        rows = []
        for name in names:
            model = build(name, device="meta")
            tags = ", ".join(list_weights(name)) or "-"
            rows.append([name, f"{count_parameters(model):,}", f"{model.num_features:,}", tags])
        say(format_table(["model", "parameters", "features", "weights"], rows))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info(Settings):
    """Show the configuration, cost, stages and feature shapes of a model or of weights."""

    input_size: InputSize = None
    model: Annotated[Positional[str], arg(metavar="MODEL|WEIGHTS")]
    """Name of a model in `tresnet list`, or weights: a tag, a file, a directory in timm's layout or
    hf-hub:USER/NAME, which is downloaded if needed."""
    num_classes: int | None = None
    """Number of classes. None: that of the weights, or 1000."""

    def run(self, argv: list[str]) -> int:
        from tresnet.checkpoints.describe import open_checkpoint
        from tresnet.checkpoints.locate import list_weights
        from tresnet.measure.macs import count_macs, count_parameters
        from tresnet.models.zoo import build, image_size, list_models

        name, opened = self.model, None
        options: dict[str, Any] = {"num_classes": 1000}
        if name not in list_models() and ("." in name or "/" in name or os.path.exists(name)):
            opened = open_checkpoint(name)
            name, options = opened.config.variant, opened.config.options
        if self.num_classes is not None:
            options["num_classes"] = self.num_classes
        model = build(name, **options, device="meta")
        cfg = model.pretrained_cfg if opened is None else opened.pretrained_cfg
        height, width = sides(self.input_size or image_size(cfg))
        macs, sizes = count_macs(model, height, width)
        say(self.model)
        say(f"parameters  {count_parameters(model):,}")
        say(f"MACs        {macs:,} for one image of {height} x {width}")
        say(f"features    {model.num_features:,}")
        if opened is None:
            say(f"weights     {listed(list_weights(name))}\n")
        else:
            say(f"classes     {listed(opened.classes or ())}")
            say("".join(f"{key:<12}{text}\n" for key, text in opened.facts().items()))
        configuration = [[key, str(value)] for key, value in model.config.to_dict().items()]
        say(format_table(["configuration", "value"], configuration) + "\n")
        rows = []
        for stage in model.feature_info:
            name, channels = stage["module"], str(stage["num_chs"])
            shape = " x ".join([channels, *map(str, sizes[name])])
            rows.append([name, channels, str(stage["reduction"]), shape])
        say(format_table(["stage", "channels", "stride", "shape for one image"], rows))
        return 0
