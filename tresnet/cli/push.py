"""`tresnet push`: weights for timm's users, in a directory or on the hub."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import say


@dataclasses.dataclass(frozen=True)
class Push:
    """Write weights, config.json and a model card in the layout of timm and the hub."""

    weights: Annotated[Positional[str], arg(metavar="WEIGHTS")]
    """A tag of `tresnet list`, a file such as a run's best.safetensors, a directory in timm's
    layout or hf-hub:USER/NAME."""
    target: Annotated[Positional[str], arg(metavar="DIR|hf-hub:USER/NAME")]
    """A new directory, or a repository of the hub, created if needed (needs HF_TOKEN)."""
    license: str | None = None
    """SPDX identifier, such as apache-2.0. None: that of published weights."""
    private: bool = False
    """Make the new repository private."""

    def run(self, argv: list[str]) -> int:
        """Write everything or nothing."""
        from tresnet.checkpoints.layout import push
        from tresnet.checkpoints.weights import open_weights

        say(push(open_weights(self.weights), self.target, self.license, self.private))
        return 0
