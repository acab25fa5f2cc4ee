"""Opens what AOTInductor compiled, and checks what it is given."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import CheckpointError, InputError
from tresnet.export.images import Images


class CompiledPackage:
    """A model compiled ahead of time.

    The package itself looks neither at types nor at strides: given bytes in another memory format
    it takes one pixel for another and returns nonsense, without a word. This refuses such images.

    Attributes:
        images: what it takes.
        metadata: what was stored beside it: class names, preprocessing and so on.
    """

    def __init__(self, package: Any, metadata: dict[str, Any]) -> None:
        """Keep the opened package."""
        self.metadata = metadata
        self.images = Images(**metadata["images"])
        self.device = torch.device(metadata["device"])
        self._package = package

    def __call__(self, images: Tensor) -> Tensor:
        """Images to logits (N, classes).

        Raises:
            InputError: type, shape, layout or device are not those it was compiled for.
        """
        self.images.check(images)
        if images.device.type != self.device.type:
            raise InputError(f"expected images on {self.device}, got them on {images.device}")
        with torch.inference_mode():
            return self._package(images)


def load_aoti(path: str | os.PathLike[str]) -> CompiledPackage:
    """Open a package that `export_model` wrote with format 'aoti'.

    A package holds machine code, which runs: open those alone that you trust.

    Raises:
        CheckpointError: there is no such file, or it is no such package.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"no package at {os.fspath(path)}: check the path")
    try:
        package = torch._inductor.aoti_load_package(os.fspath(path))
        stored = package.get_metadata()
        metadata = {key: json.loads(text) for key, text in stored.items() if key[0].islower()}
        return CompiledPackage(package, metadata)
    except (RuntimeError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is no package of tresnet export --format aoti for this machine "
            f"({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
        ) from error
