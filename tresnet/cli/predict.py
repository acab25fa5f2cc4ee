"""`tresnet predict`: names what image files show."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import fail, progress, say
from tresnet.errors import DataError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from tresnet.checkpoints.weights import OpenWeights
    from tresnet.steps import InferenceStep

BAD_IMAGE_EXIT_CODE = 2


@dataclasses.dataclass(frozen=True)
class Predict:
    """Name the class of each image file, with its probability."""

    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE [IMAGE ...]")]
    """Image files. One that cannot be read is an error, the others are still predicted."""

    weights: str
    """A tag of `tresnet list`, a file, a directory in timm's layout or hf-hub:USER/NAME."""

    topk: int = 1
    """How many classes to name, the likeliest first."""

    device: str = "cpu"
    """Where to compute, such as cuda."""

    impl: Literal["auto", "triton", "reference"] = "auto"
    """What computes the norms: Triton kernels, or plain operators."""

    pad: bool = False
    """Widths in multiples of 8, as tensor cores want them: the same outputs."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """Autocast to a 16-bit type."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the weights."""

    channels_last: bool = False
    """Memory layout that is fastest on GPUs."""

    compile: Literal[
        "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "none"
    """Mode of torch.compile."""

    freeze: bool = False
    """With --compile: compile the weights in as constants."""

    fold: bool = True
    """Fold each batch norm into the convolution before it: the same outputs up to rounding."""

    def run(self, argv: list[str]) -> int:
        """Print a line an image."""
        from tresnet.checkpoints.weights import open_weights
        from tresnet.data.folder import load_rgb
        from tresnet.data.transforms import EvalTransform, eval_transform

        if not self.images:
            raise InputError("expected at least one image file, got none")
        if self.topk < 1:
            raise InputError(f"expected topk of at least 1, got {self.topk}")
        opened = open_weights(self.weights)
        known = opened.info
        if known.num_classes == 0:
            raise InputError(f"expected weights of a classifier, but {self.weights} has no classes")
        step = self._step(opened)
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
                logits = step(step.feed.images(image[None]))[0]
                say(f"{path}: {name_classes(logits, known.classes, self.topk, several)}")
        return exit_code

    def _step(self, opened: "OpenWeights") -> "InferenceStep":
        from tresnet.checkpoints.creation import create
        from tresnet.env import usable_device
        from tresnet.steps import InferenceCompute, InferenceStep

        device = usable_device(self.device)
        opened.check_finite()
        compute = InferenceCompute(
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(InferenceCompute)}
        )
        model = create(weights=opened, device=device, impl=self.impl, pad=self.pad)
        return InferenceStep(model, compute, device, say=progress)


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
