"""`tresnet info`: configuration and cost of a model."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.settings import ImageSize, sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info(ImageSize):
    """Show a model's configuration, cost, stages, feature shapes and weights."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A name out of `tresnet list`."""
    num_classes: int = 1000
    """Width of the classifier."""

    def run(self, argv: list[str]) -> int:
        """Print the facts; nothing is downloaded."""
        from tresnet.checkpoints.published import list_weights
        from tresnet.measure.macs import count_macs, count_parameters, output_sizes
        from tresnet.models.zoo import build, image_size

        model = build(self.model, num_classes=self.num_classes, device="meta")
        height, width = sides(self.input_size or image_size(model.pretrained_cfg))
        sizes = output_sizes(model, height, width)
        stages = [
            [
                info["module"],
                str(info["num_chs"]),
                str(info["reduction"]),
                " x ".join(map(str, (info["num_chs"], *sizes[info["module"]]))),
            ]
            for info in model.feature_info
        ]
        say(self.model)
        say(f"parameters  {count_parameters(model):,}")
        say(f"MACs        {count_macs(model, sizes):,} for one image of {height} x {width}")
        say(f"features    {model.num_features:,}")
        say(f"weights     {', '.join(list_weights(self.model)) or 'none'}")
        say("")
        configuration = [[key, str(value)] for key, value in model.config.to_dict().items()]
        say(format_table(["configuration", "value"], configuration))
        say("")
        say(format_table(["stage", "channels", "stride", "shape for one image"], stages))
        return 0
