"""Published ImageNet top-1 of the models a benchmark can name; nothing is measured here."""

import dataclasses

from tresnet.checkpoints.published import entries
from tresnet.models.named import split_name

_IMAGENET_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Published:
    """What the publisher of weights states.

    Attributes:
        weights: the weights' name.
        top1: percent.
        source: who says so.
    """

    weights: str
    top1: float
    source: str


def published_top1(model: str, input_size: int | None) -> list[Published]:
    """Accuracies of all ImageNet-1k weights of a model at an input size, the best last.

    Ours and timm's TResNets share their weights: both take the table in weights/manifest.json.
    torchvision's are its default weights', as its own metadata states them; empty for other models.

    Args:
        model: ours, `timm:NAME` or `torchvision:NAME`.
        input_size: side of the images in pixels.
    """
    source, name = split_name(model)
    found = _torchvision(name, input_size) if source == "torchvision" else _ours(name, input_size)
    return sorted(found, key=lambda one: one.top1)


def _ours(name: str, input_size: int | None) -> list[Published]:
    return [
        Published(tag, entry.top1, entry.accuracy_source or "weights/manifest.json")
        for tag, entry in entries().items()
        if entry.model == name
        and entry.num_classes == _IMAGENET_CLASSES
        and entry.input_size[-1] == input_size
        and entry.top1 is not None
    ]


def _torchvision(name: str, input_size: int | None) -> list[Published]:
    from torchvision.models import get_model_weights

    weights = get_model_weights(name).DEFAULT  # pyright: ignore[reportAttributeAccessIssue]
    metrics = weights.meta.get("_metrics", {}).get("ImageNet-1K", {})
    if "acc@1" not in metrics or weights.transforms().crop_size != [input_size]:
        return []
    return [Published(f"{name}.{weights.name}", metrics["acc@1"], "torchvision's metadata")]
