"""Web page that shows an image's likeliest classes, and a Grad-CAM picture of the first."""

from typing import TYPE_CHECKING, Any

from tresnet.data.decoding import BadImageError
from tresnet.errors import OutputError, needed
from tresnet.predictions.predictor import Predictor

if TYPE_CHECKING:
    from PIL.Image import Image


def make_page(predictor: Predictor, title: str) -> Any:
    """Return a `gradio.Interface` for a `Predictor` with `maps=True`; gradio must be installed."""
    with needed("the page", "demo"):
        import gradio  # pyright: ignore[reportMissingImports]

    def answer(path: str | None) -> tuple[dict[str, float] | str | None, "Image | None"]:
        if path is None:  # the user removed the image
            return None, None
        try:
            (prediction,) = predictor(path)
        except (BadImageError, OutputError) as error:
            reason = error.reason if isinstance(error, BadImageError) else str(error)
            raise gradio.Error(reason, print_exception=False) from error
        names = prediction.classes
        if len(set(names)) < len(names):  # a dict needs unique names; ImageNet has two "crane"
            names = [f"{n} ({number})" for n, number in zip(names, prediction.numbers, strict=True)]
        chances = dict(zip(names, prediction.probabilities, strict=True))
        return chances or "no label", prediction.map

    return gradio.Interface(
        answer,
        # type="pil" would rotate by EXIF and clip 16-bit pixels, unlike `tresnet.predict`
        gradio.Image(type="filepath", image_mode=None, label="Image", height=320),
        [gradio.Label(label="Classes"), gradio.Image(label="Where", format="png", height=320)],
        live=True,
        title=title,
        flagging_mode="never",
        analytics_enabled=False,  # gradio would send usage data
    )
