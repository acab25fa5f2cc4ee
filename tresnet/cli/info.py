"""`tresnet info`: configuration and cost of a model."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.settings import ImageSize

if TYPE_CHECKING:
    from tresnet.models.tresnet import TResNet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info(ImageSize):
    """Show a model's configuration, cost, stages, feature shapes and weights."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A name out of `tresnet list`."""
    num_classes: int = 1000
    """Width of the classifier."""

    def run(self, argv: list[str]) -> int:
        """Print the facts; nothing is computed or downloaded."""
        from tresnet.checkpoints.published import list_weights
        from tresnet.measure.macs import count_macs, count_parameters, without_computing
        from tresnet.models.zoo import build

        with without_computing():
            model = build(self.model, num_classes=self.num_classes)
            size = self.input_size or int(model.pretrained_cfg["input_size"][-1])
            channels = model.config.in_chans
            macs = count_macs(model, (1, channels, size, size))
            stages = _stages(model, (1, channels, size, size))
        say(self.model)
        say(f"parameters  {count_parameters(model):,}")
        say(f"MACs        {macs:,} for one image of {size} x {size}")
        say(f"features    {model.num_features:,}")
        say(f"weights     {', '.join(list_weights(self.model)) or 'none'}")
        say("")
        configuration = [[key, str(value)] for key, value in model.config.to_dict().items()]
        say(format_table(["configuration", "value"], configuration))
        say("")
        say(format_table(["stage", "channels", "stride", "shape for one image"], stages))
        return 0


def _stages(model: "TResNet", shape: tuple[int, int, int, int]) -> list[list[str]]:
    import torch

    model.eval()
    with torch.no_grad():
        maps = model.forward_intermediates(torch.empty(shape), intermediates_only=True)
    assert isinstance(maps, list), "intermediates_only returns only the maps"
    return [
        [
            info["module"],
            str(info["num_chs"]),
            str(info["reduction"]),
            " x ".join(map(str, feature_map.shape[1:])),
        ]
        for info, feature_map in zip(model.feature_info, maps, strict=True)
    ]
