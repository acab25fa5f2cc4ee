"""TResNet as a backbone that maps images to feature maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tresnet.models.tresnet import TResNet

if TYPE_CHECKING:
    from timm.models._features import FeatureGetterNet


def feature_extractor(
    model: TResNet, out_indices: int | Sequence[int] | None = None
) -> "FeatureGetterNet":
    """Return timm's module that outputs feature maps, and remove unused layers of `model` in place.

    Index 0 is the stem's map, and indices 1 to 4 (the default) are the maps of the stages. An int n
    means the last n maps. Parameter names get the prefix `model.`. The methods of
    `feature_info`, such as `channels()`, list one value for each returned map.
    """
    from timm.models._features import FeatureGetterNet

    indices: Any = (1, 2, 3, 4) if out_indices is None else out_indices
    extractor: Any = FeatureGetterNet(model, indices)
    extractor.config = model.config
    extractor.pretrained_cfg = extractor.default_cfg = model.pretrained_cfg
    return extractor
