"""`tresnet convert` and `tresnet push`: write weights in another format or to the hub."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import progress, say
from tresnet.errors import InputError
from tresnet.settings import CROP, ClassMap, WeightsName


def convert(
    source: Annotated[Positional[WeightsName], arg(metavar="IN")],
    target: Annotated[Positional[Path], arg(metavar="OUT")],
    *,
    class_map: ClassMap = None,
    format: Literal["tresnet", "timm"] = "tresnet",
    model: str | None = None,
    labels: Literal["single", "multi"] | None = None,
) -> int:
    """Convert weights of tresnet, timm or the public TResNet code to tresnet's or timm's format.

    Args:
        target: New file to write, ending in .safetensors, .pth or .pt.
        format: Format of OUT. Only tresnet stores the configuration, image size, crop and class
            names with the weights.
        model: Model that the weights must belong to. None: the model whose name is in the weights.
        labels: single: one label per image. multi: any number of labels. Only tresnet stores it,
            and all commands read it there. None: what IN states, or the guess that `tresnet info
            IN` shows.
    """
    from tresnet.checkpoints.creation import create
    from tresnet.checkpoints.describe import open_checkpoint
    from tresnet.checkpoints.save import save_checkpoint
    from tresnet.data import labels as data_labels

    if target.exists():
        raise InputError(f"expected a new file to write, but {target} exists: remove it")
    opened = open_checkpoint(source).named(data_labels.class_map(class_map))
    built: Any = create(model, weights=opened)
    stated = {} if labels is None else {"labels": labels}
    metadata = None if format == "timm" else opened.user | stated
    save_checkpoint(built, target, format=format, metadata=metadata)
    if metadata is None:
        height, width = opened.pretrained_cfg["input_size"][1:]
        crop = (f"{name} {opened.pretrained_cfg[name]}" for name in CROP)
        left_out = ", ".join([f"input_size {height} x {width}", *crop, *opened.user, *stated])
        progress(f"left out, because timm's format cannot store it: {left_out}")
    about = built.config
    say(f"{target}: {about.variant}, {about.num_classes} classes, {format} format")
    return 0


def push(
    weights: Annotated[Positional[str], arg(metavar="WEIGHTS")],
    target: Annotated[Positional[str], arg(metavar="DIR|hf-hub:USER/NAME")],
    *,
    license: str | None = None,
    private: bool = False,
) -> int:
    """Write weights, config.json and a model card to a directory or the hub, as timm does.

    Args:
        weights: Weights: a tag of `tresnet list`, a file such as a run's best.safetensors, a
            directory in timm's layout or hf-hub:USER/NAME.
        target: New directory, or a hub repository, which is created if needed and requires
            HF_TOKEN.
        license: SPDX identifier, such as apache-2.0, or other. None: the licence of WEIGHTS, which
            must then be published weights.
        private: Make the repository private when it is created.
    """
    from tresnet.checkpoints import push
    from tresnet.checkpoints.describe import open_checkpoint

    say(push.push(open_checkpoint(weights), target, license, private))
    return 0
