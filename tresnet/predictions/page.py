"""A web page that shows an image's likeliest classes and a Grad-CAM picture of the likeliest."""

from typing import TYPE_CHECKING, Any

from tresnet.errors import needed
from tresnet.predictions.predictor import Predictor

if TYPE_CHECKING:
    from PIL.Image import Image


def make_page(predictor: Predictor, title: str) -> Any:
    """Return a `gradio.Interface` for a `Predictor` with `maps=True`; gradio must be installed."""
    with needed("the page", "demo"):
        import gradio  # pyright: ignore[reportMissingImports]

    def answer(image: "Image | None") -> tuple[dict[str, float] | None, "Image | None"]:
        if image is None:  # the user removed the image
            return None, None
        (prediction,) = predictor(image)
        names = [  # a dict needs unique names, but ImageNet has two classes "crane"
            f"{name} ({number})" if prediction.classes.count(name) > 1 else name
            for name, number in zip(prediction.classes, prediction.numbers, strict=True)
        ]
        return dict(zip(names, prediction.probabilities, strict=True)), prediction.map

    return gradio.Interface(
        answer,
        gradio.Image(type="pil", label="Image", height=320),
        [gradio.Label(label="Classes"), gradio.Image(label="Where", format="png", height=320)],
        live=True,
        title=title,
        flagging_mode="never",
        analytics_enabled=False,  # gradio would send usage data
    )
