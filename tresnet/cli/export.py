"""`tresnet export`: write a model for another runtime."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, say
from tresnet.settings import ExportOptions

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def export(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    *,
    output: Path | None = None,
    file: ExportOptions,
) -> int:
    """Export a model for another runtime, if the results of the file match those of the model.

    Args:
        model: A tag of `tresnet list`, a file of weights, or a model's name, which means random
            weights.
        output: File to write. None: a file in the current directory with the name of MODEL.
    """
    from tresnet.checkpoints.creation import create
    from tresnet.checkpoints.describe import open_checkpoint
    from tresnet.data.labels import class_map
    from tresnet.export import FORMATS, export_model
    from tresnet.models.zoo import list_models

    name, info, user, classes = model, None, {}, class_map(file.class_map)
    if name in list_models():
        built = create(name)
    else:
        info = open_checkpoint(name).named(classes)
        info.check_finite()
        user, classes = info.user, info.classes
        built = create(weights=info)
        # remove only suffixes of files: a tag such as tresnet_t.digits contains a dot
        name = path.stem if (path := Path(name)).suffix in _SUFFIXES else path.name
    suffix = FORMATS[file.format].suffixes[0]
    done = export_model(
        built.eval(),
        output or Path(f"{name}{suffix}"),
        file,
        classes=classes,
        descriptions=info and info.descriptions,
        labels=user.get("labels", "single"),
        threshold=user.get("threshold"),
    )
    rows = [["largest difference of logits", f"{done.difference:.1e}"]]
    if done.images:
        rows += [
            [f"top-1 on {done.images} images", f"{done.top1:.2f} %"],
            ["the model's", f"{done.model_top1:.2f} %"],
        ]
    say(format_table([str(done.path), ""], rows))
    return 0
