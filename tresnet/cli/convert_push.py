"""`tresnet convert` and `tresnet push`: write weights in another format or to the hub."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import progress, say
from tresnet.errors import InputError
from tresnet.settings import CROP, ClassMap


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert weights of tresnet, timm or the public TResNet code to tresnet's or timm's format."""

    source: Annotated[Positional[str], arg(metavar="IN")]
    """Weights: a tag of `tresnet list`, a file, a folder in timm's layout or hf-hub:USER/NAME."""
    target: Annotated[Positional[Path], arg(metavar="OUT")]
    """New file to write, ending in .safetensors, .pth or .pt."""
    class_map: ClassMap = None
    format: Literal["tresnet", "timm"] = "tresnet"
    """Format of OUT. Only tresnet stores the configuration, image size, crop and class names with
    the weights."""
    model: str | None = None
    """Model that the weights must belong to. None: the model whose name is in the weights."""
    labels: Literal["single", "multi"] | None = None
    """single: one label per image. multi: any number of labels. Only tresnet stores it, and all
    commands read it there. None: what IN states, or the guess that `tresnet info IN` shows."""

    def run(self, argv: list[str]) -> int:
        from tresnet.checkpoints.creation import create
        from tresnet.checkpoints.describe import open_checkpoint
        from tresnet.checkpoints.save import save_checkpoint
        from tresnet.data.labels import class_map

        if self.target.exists():
            raise InputError(f"expected a new file to write, but {self.target} exists: remove it")
        opened = open_checkpoint(self.source).named(class_map(self.class_map))
        model: Any = create(self.model, weights=opened)
        stated = {} if self.labels is None else {"labels": self.labels}
        metadata = None if self.format == "timm" else opened.user | stated
        save_checkpoint(model, self.target, format=self.format, metadata=metadata)
        if metadata is None:
            height, width = opened.pretrained_cfg["input_size"][1:]
            crop = (f"{name} {opened.pretrained_cfg[name]}" for name in CROP)
            left_out = ", ".join([f"input_size {height} x {width}", *crop, *opened.user, *stated])
            progress(f"left out, because timm's format cannot store it: {left_out}")
        say(
            f"{self.target}: {model.config.variant}, {model.config.num_classes} classes, "
            f"{self.format} format"
        )
        return 0


@dataclasses.dataclass(frozen=True)
class Push:
    """Write weights, config.json and a model card to a directory or the hub, as timm does."""

    weights: Annotated[Positional[str], arg(metavar="WEIGHTS")]
    """Weights: a tag of `tresnet list`, a file such as a run's best.safetensors, a directory in
    timm's layout or hf-hub:USER/NAME."""
    target: Annotated[Positional[str], arg(metavar="DIR|hf-hub:USER/NAME")]
    """New directory, or a hub repository, which is created if needed and requires HF_TOKEN."""
    license: str | None = None
    """SPDX identifier, such as apache-2.0, or other. None: the licence of WEIGHTS, which must then
    be published weights."""
    private: bool = False
    """Make the repository private when it is created."""

    def run(self, argv: list[str]) -> int:
        from tresnet.checkpoints.describe import open_checkpoint
        from tresnet.checkpoints.push import push

        say(push(open_checkpoint(self.weights), self.target, self.license, self.private))
        return 0
