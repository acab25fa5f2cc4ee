"""`tresnet demo`: serve a web page to try a model."""

import dataclasses
from typing import Annotated

from annotated_types import Ge, Le
from tyro.conf import Positional, arg

from tresnet.cli.output import progress
from tresnet.errors import InputError
from tresnet.settings import DeviceName
from tresnet.settings.fields import Count, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo(Settings):
    """Serve a web page that shows an image's likeliest classes, with a Grad-CAM picture."""

    device: DeviceName = "auto"
    weights: Annotated[Positional[str], arg(metavar="WEIGHTS")]
    """Weights: a tag of `tresnet list`, a file, a folder in timm's layout or hf-hub:USER/NAME."""
    top_k: Count | None = None
    """Number of classes to show. None: 5, or for many labels all from the threshold that the
    weights hold."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1: only this machine. 0.0.0.0: all networks."""
    port: Annotated[int, Ge(1), Le(65535)] = 7860
    """Port to listen at."""

    def run(self, argv: list[str]) -> int:
        from tresnet.checkpoints.describe import open_checkpoint
        from tresnet.predictions import Predictor
        from tresnet.predictions.page import make_page

        weights = open_checkpoint(self.weights)
        stated = weights.labels == "multi" and weights.user.get("threshold") is not None
        top_k = self.top_k or (None if stated else 5)
        options = {"top_k": top_k, "device": self.device, "say": progress}
        page = make_page(Predictor(weights, maps=True, **options), self.weights)
        try:
            page.launch(server_name=self.host, server_port=self.port, show_error=True)
        except OSError as error:  # gradio's text names its own functions, and no reason
            raise InputError(
                f"cannot serve at {self.host}:{self.port}: choose a free --port, and as --host an"
                " address of this machine"
            ) from error
        return 0
