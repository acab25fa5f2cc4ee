"""`tresnet list` and `tresnet info`: show models, their weights, configuration and cost."""

import os
from typing import Annotated, Any

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.errors import InputError, listed
from tresnet.settings import InputSize, sides


def list_all(pattern: Annotated[Positional[str], arg(metavar="PATTERN")] = "*") -> int:
    """List the models with their parameters, features and weights.

    Args:
        pattern: Shell pattern of the models' names, such as '*_l'.
    """
    from tresnet.checkpoints.locate import list_weights
    from tresnet.measure.macs import count_parameters
    from tresnet.models.zoo import build, list_models

    names = list_models(pattern)
    if not names:
        raise InputError(
            f"expected a pattern that matches a model, got {pattern!r}: "
            f"known are {listed(list_models())}"
        )
    rows = []
    for name in names:
        model = build(name, device="meta")
        tags = ", ".join(list_weights(name)) or "-"
        rows.append([name, f"{count_parameters(model):,}", f"{model.num_features:,}", tags])
    say(format_table(["model", "parameters", "features", "weights"], rows))
    return 0


def info(
    model: Annotated[Positional[str], arg(metavar="MODEL|WEIGHTS")],
    *,
    input_size: InputSize = None,
    num_classes: int | None = None,
) -> int:
    """Show the configuration, cost, stages and feature shapes of a model or of weights.

    Args:
        model: Name of a model in `tresnet list`, or weights: a tag, a file, a directory in timm's
            layout or hf-hub:USER/NAME, which is downloaded if needed.
        num_classes: Number of classes. None: that of the weights, or 1000.
    """
    from tresnet.checkpoints.describe import open_checkpoint
    from tresnet.checkpoints.locate import list_weights
    from tresnet.measure.macs import count_macs, count_parameters
    from tresnet.models.zoo import build, image_size, list_models

    name, opened = model, None
    options: dict[str, Any] = {"num_classes": 1000}
    if name not in list_models() and ("." in name or "/" in name or os.path.exists(name)):
        opened = open_checkpoint(name)
        name, options = opened.config.variant, opened.config.options
    if num_classes is not None:
        options["num_classes"] = num_classes
    built = build(name, **options, device="meta")
    cfg = built.pretrained_cfg if opened is None else opened.pretrained_cfg
    height, width = sides(input_size or image_size(cfg))
    macs, sizes = count_macs(built, height, width)
    say(model)
    say(f"parameters  {count_parameters(built):,}")
    say(f"MACs        {macs:,} for one image of {height} x {width}")
    say(f"features    {built.num_features:,}")
    if opened is None:
        say(f"weights     {listed(list_weights(name))}\n")
    else:
        say(f"classes     {listed(opened.classes or ())}")
        say("".join(f"{key:<12}{text}\n" for key, text in opened.facts().items()))
    configuration = [[key, str(value)] for key, value in built.config.to_dict().items()]
    say(format_table(["configuration", "value"], configuration) + "\n")
    rows = []
    for stage in built.feature_info:
        name, channels = stage["module"], str(stage["num_chs"])
        shape = " x ".join([channels, *map(str, sizes[name])])
        rows.append([name, channels, str(stage["reduction"]), shape])
    say(format_table(["stage", "channels", "stride", "shape for one image"], rows))
    return 0
