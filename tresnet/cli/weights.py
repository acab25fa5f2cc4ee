"""`tresnet convert` and `tresnet push`: weights in another format, for timm's users or the hub."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import progress, say
from tresnet.errors import InputError


@dataclasses.dataclass(frozen=True)
class Convert:
    """Read weights in our, timm's or the public TResNet format and write them in another."""

    source: Annotated[Positional[str], arg(metavar="IN")]
    """A tag of `tresnet list`, a file, a directory in timm's layout or hf-hub:USER/NAME."""
    target: Annotated[Positional[Path], arg(metavar="OUT")]
    """The file to write: .safetensors, .pth or .pt. It must not exist."""
    format: Literal["tresnet", "timm"] = "tresnet"
    """tresnet keeps the configuration and the class names with the weights; timm does not."""
    model: str | None = None
    """The model that the weights must belong to; by default it follows from them."""

    def run(self, argv: list[str]) -> int:
        """Write the new file atomically."""
        from tresnet.checkpoints.creation import create
        from tresnet.checkpoints.save import save_checkpoint
        from tresnet.checkpoints.weights import open_weights

        if self.target.exists():
            raise InputError(f"expected a new file to write, but {self.target} exists: remove it")
        opened = open_weights(self.source)
        model = create(self.model, weights=opened)
        metadata = opened.user or None
        if self.format == "timm" and metadata:
            progress(f"not kept, timm's format has no place for it: {', '.join(metadata)}")
            metadata = None
        save_checkpoint(model, self.target, format=self.format, metadata=metadata)
        say(
            f"{self.target}: {model.config.variant}, {model.config.num_classes} classes, "
            f"{self.format} format"
        )
        return 0


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
