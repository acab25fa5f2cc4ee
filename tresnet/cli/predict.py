"""`tresnet predict`: names what image files show."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import fail, say
from tresnet.errors import DataError, InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BAD_IMAGE_EXIT_CODE = 2


@dataclasses.dataclass(frozen=True)
class Predict:
    """Name the class of each image file, with its probability."""

    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE [IMAGE ...]")]
    """Image files. One that cannot be read is an error, the others are still predicted."""

    weights: str
    """A tag out of `tresnet list`, or a file of weights."""

    topk: int = 1
    """How many classes to name, the likeliest first."""

    device: str = "cpu"
    """Where to compute, such as cuda."""

    def run(self, argv: list[str]) -> int:
        """Print a line an image."""
        from tresnet.checkpoints.creation import create
        from tresnet.checkpoints.weights import open_weights
        from tresnet.data.folder import load_rgb
        from tresnet.data.transforms import EvalTransform, eval_transform
        from tresnet.env import usable_device

        if not self.images:
            raise InputError("expected at least one image file, got none")
        if self.topk < 1:
            raise InputError(f"expected topk of at least 1, got {self.topk}")
        device = usable_device(self.device)
        opened = open_weights(self.weights)
        opened.check_finite()
        model = create(weights=opened, device=device).eval()
        known = opened.info
        if known.num_classes == 0:
            raise InputError(f"expected weights of a classifier, but {self.weights} has no classes")
        transform = eval_transform(
            EvalTransform(
                size=known.input_size[-1],
                crop_mode=known.crop_mode,  # pyright: ignore[reportArgumentType]
                crop_pct=known.crop_pct,
                interpolation=known.interpolation,  # pyright: ignore[reportArgumentType]
            )
        )
        several = known.user.get("labels") == "multi"
        exit_code = 0
        for path in self.images:
            try:
                image = transform(load_rgb(path))
            except DataError as error:
                fail(error)
                exit_code = BAD_IMAGE_EXIT_CODE
            else:
                logits = _logits(model, image.to(device))
                named = name_classes(logits, known.classes, self.topk, several)
                say(f"{path}: {named}")
        return exit_code


def name_classes(
    logits: "Tensor", classes: tuple[str, ...] | None, topk: int, several: bool = False
) -> str:
    """The likeliest classes, such as `7 (99.8 %), 1 (0.1 %)`; by number where no name is known.

    Args:
        logits: (num_classes,) floating point.
        classes: their names in order, or None.
        topk: how many at most.
        several: an image may have several labels, each with a probability of its own.
    """
    every = logits.float().sigmoid() if several else logits.float().softmax(0)
    chances, labels = every.topk(min(topk, logits.numel()))
    names = [f"class {label}" if classes is None else classes[label] for label in labels.tolist()]
    return ", ".join(
        f"{name} ({chance:.1%})".replace("%", " %")
        for name, chance in zip(names, chances.tolist(), strict=True)
    )


def _logits(model: "torch.nn.Module", image: "Tensor") -> "Tensor":
    """(3, H, W) in [0, 1] to (num_classes,)."""
    import torch

    with torch.inference_mode():
        return model(image[None])[0]
