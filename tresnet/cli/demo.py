"""`tresnet demo`: serve a web page to try a model."""

from typing import Annotated

from annotated_types import Ge, Le
from tyro.conf import Positional, arg

from tresnet.cli.output import progress
from tresnet.errors import InputError
from tresnet.settings import DeviceName, WeightsName
from tresnet.settings.fields import Count


def demo(
    weights: Annotated[Positional[WeightsName], arg(metavar="WEIGHTS")],
    *,
    device: DeviceName = "auto",
    top_k: Count | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Ge(1), Le(65535)] = 7860,
) -> int:
    """Serve a web page that shows an image's likeliest classes, with a Grad-CAM picture.

    Args:
        top_k: Number of classes to show. None: 5, or for many labels all from the threshold that
            the weights hold.
        host: Address to listen at. 127.0.0.1: only this machine. 0.0.0.0: all networks.
        port: Port to listen at.
    """
    from tresnet.checkpoints.describe import open_checkpoint
    from tresnet.predictions import Predictor
    from tresnet.predictions.page import make_page

    opened = open_checkpoint(weights)
    stated = opened.labels == "multi" and opened.user.get("threshold") is not None
    top_k = top_k or (None if stated else 5)
    options = {"top_k": top_k, "device": device, "say": progress}
    page = make_page(Predictor(opened, maps=True, **options), weights)
    try:
        page.launch(server_name=host, server_port=port, show_error=True)
    except OSError as error:  # gradio's text names its own functions, and no reason
        raise InputError(
            f"cannot serve at {host}:{port}: choose a free --port, and as --host an address of"
            " this machine"
        ) from error
    return 0
