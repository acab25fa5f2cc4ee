"""A TResNet as a backbone: images in, feature maps out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.models.tresnet import TResNet


class FeatureExtractor(nn.Module):
    """Return the feature maps of chosen stages: 0 is the stem, 1 to 4 the stages (default: 1 to 4).

    Parameters keep the names they have in the whole model. `feature_info` is timm's `FeatureInfo`:
    `channels()`, `reduction()` and `module_name()` list one value a map.
    """

    __jit_unused_properties__ = ("default_cfg",)

    def __init__(self, model: TResNet, out_indices: int | Sequence[int] | None = None) -> None:
        """Take the body of `model`, up to the last of the `out_indices` (or of that many)."""
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
        """The pretrained configuration, under timm's older name."""
        return self.pretrained_cfg

    def forward(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) to one (N, C_i, H / r_i, W / r_i) a chosen stage."""
        if not torch.jit.is_scripting():
            return self._forward_eager(x)
        parts: list[Tensor] = []
        for stage in self.model.body:
            x = stage(x)
            parts.append(x)
        return [parts[index + 1] for index in self.out_indices]

    @torch.jit.unused
    def _forward_eager(self, x: Tensor) -> list[Tensor]:
        maps = self.model.forward_intermediates(x, self.out_indices, intermediates_only=True)
        assert isinstance(maps, list)
        return maps
