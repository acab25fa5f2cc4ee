"""TResNet as a backbone, which turns images into feature maps."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tresnet.models.tresnet import TResNet


class FeatureExtractor(nn.Module):
    """Returns feature maps of a TResNet instead of logits.

    Index 0 is the stem's map. Indices 1 to 4 are the stages' maps, which are returned by default.
    Parameter names are those of `TResNet` with the prefix `model.`. `feature_info` is timm's
    `FeatureInfo`. Its methods such as `channels()` list one value for each returned map.
    """

    def __init__(self, model: TResNet, out_indices: int | Sequence[int] | None = None) -> None:
        """Prune `model` in place; `out_indices` lists indices; an int n means the last n maps."""
        super().__init__()
        from timm.models import FeatureInfo

        indices = (1, 2, 3, 4) if out_indices is None else out_indices
        self.out_indices = list(model.prune_intermediate_layers(indices))
        self.config = model.config
        self.pretrained_cfg = model.pretrained_cfg
        self.model = model
        self.feature_info: Any = FeatureInfo(model.feature_info, tuple(self.out_indices))

    @property
    def default_cfg(self) -> dict[str, Any]:
        """Same as `pretrained_cfg`; older versions of timm use this name."""
        return self.pretrained_cfg

    def forward(self, x: Tensor) -> list[Tensor]:
        """Map (N, in_chans, H, W) to one (N, channels, H / reduction, W / reduction) per index."""
        model: Any = self.model
        return model.forward_intermediates(x, self.out_indices, intermediates_only=True)
