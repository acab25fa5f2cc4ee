"""Find the format of a file of weights, and rename the file's tensors to this package's names.

This package's names are timm's. The public format, of the TResNet authors' code, has other names.
This format stores in-place ABN's weight w; gamma is |w| + 1e-5 (arXiv 1712.02616, inplace-abn).
`identify` finds a model's architecture from the names and shapes of the weights.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.read import read_file
from tresnet.errors import CheckpointError, InputError
from tresnet.models.zoo import VARIANTS, make_config
from tresnet.settings.model import ModelConfig

INPLACE_ABN_EPS = 1e-5
# Negative slopes of the code that wrote files without metadata: timm's and the authors'. A new
# model's defaults, in `ModelConfig`, have the values of `SLOPES`, but may change without these.
SLOPES = {"stem_slope": 1e-2, "block_slope": 1e-3}
_PUBLIC_V2_SLOPES = {"stem_slope": 1e-6, "block_slope": 1e-6}

# Prefix of a convolution and norm in the public format; a final `.0` means that a blur follows.
_CONV_NORM = r"(body\.(?:conv1|layer\d+\.\d+\.(?:conv|downsample\.)\d))(?:\.0)?"
_BLUR = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], device="cpu") / 16
# Pairs: a pattern of public names, and our name (None: a blur's filter, always `_BLUR`).
_PUBLIC_NAMES: tuple[tuple[str, str | None], ...] = (
    (rf"{_CONV_NORM}\.0\.weight", r"\1.conv.weight"),
    (rf"{_CONV_NORM}\.1\.(weight|bias|running_mean|running_var|num_batches_tracked)", r"\1.bn.\2"),
    (rf"{_CONV_NORM}\.1(?:\.op)?\.filt", None),
)
_TIMM_MARK = re.compile(r"body\.(layer\d+\.\d+\.)?(conv\d|downsample\.\d)\.(conv|bn)\.")


@dataclass(frozen=True)
class Weights:
    """Contents of a file of weights; tensors have this package's names, and norms store gamma.

    `format` is 'tresnet', 'timm' or 'public'; only 'tresnet' has `metadata` and `config`. `slopes`
    are the fields of `ModelConfig` for the leaky ReLUs. The public format has one `block_size`.
    """

    path: Path
    format: str
    tensors: dict[str, Tensor]
    slopes: dict[str, float]
    metadata: dict[str, Any] = field(default_factory=dict)
    config: ModelConfig | None = None

    @property
    def block_size(self) -> int | None:
        """Side of the stem's blocks, or None if the file does not determine it."""
        if self.config is None:
            return 4 if self.format == "public" else None
        return self.config.block_size


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read a file of weights in our, timm's or the public format, and convert names and gammas."""
    return to_ours(Path(path), *read_file(path))


def to_ours(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Weights:
    """Rename a file's tensors to this package's names; convert in-place ABN's weights to gammas.

    Slopes without metadata are 1e-6 for v2 models in the public format, and otherwise 1e-2 in the
    stem and 1e-3 in the blocks. CheckpointError: names are unknown, or `metadata` are wrong.
    """
    if _format(path, tensors) == "public":
        tensors = _from_public(path, tensors)
        v2 = any(key.startswith("body.layer1.0.conv3.") for key in tensors)
        return Weights(path, "public", tensors, _PUBLIC_V2_SLOPES if v2 else SLOPES)
    if not metadata:
        return Weights(path, "timm", tensors, SLOPES)
    try:
        config = check_metadata(metadata)
    except InputError as error:
        raise CheckpointError(
            f"{path} has metadata that this version of tresnet cannot use ({error}): "
            "upgrade tresnet, or save the file again"
        ) from error
    stated, stored = architecture(config), identify(tensors)
    if stated != stored:
        raise CheckpointError(
            f"{path} says it holds {stated}, but its tensors are of {stored}: it is damaged; "
            "copy or download it again"
        )
    slopes = {name: getattr(config, name) for name in SLOPES}
    return Weights(path, "tresnet", tensors, slopes, metadata, config)


def _format(path: Path, tensors: Mapping[str, Tensor]) -> str:
    timm = [key for key in tensors if _TIMM_MARK.match(key)]
    public = [key for key in tensors if public_name(key) != key]
    if timm and public:
        raise CheckpointError(
            f"{path} mixes timm's names (such as {timm[0]}) with those of the public TResNet "
            f"format (such as {public[0]}): save the weights of one model"
        )
    return "public" if public else "timm"


def _from_public(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = public_name(key)
        if name is None:
            wrong = value.shape[1:] != (1, 3, 3) or (value.to("cpu", torch.float) != _BLUR).any()
            if bool(wrong):
                raise CheckpointError(
                    f"{path}: {key} is not the 3x3 binomial blur that every TResNet has, so the "
                    "file belongs to another model"
                )
            continue
        if name in renamed:
            raise CheckpointError(f"{path} holds two tensors for one name of the model: {key}")
        if name.endswith(".bn.weight"):  # 16-bit dtypes would round the 1e-5 away
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            value = wide.abs() + INPLACE_ABN_EPS
        renamed[name] = value
    return renamed


def public_name(key: str) -> str | None:
    """Return our name for a public name, None for a blur's filter, or `key` for any other name."""
    for pattern, name in _PUBLIC_NAMES:
        if match := re.fullmatch(pattern, key):
            return None if name is None else match.expand(name)
    return key


class Architecture(NamedTuple):
    """The part of a model's configuration that names and shapes of weights determine."""

    layers: tuple[int, int, int, int]
    planes: int
    bottlenecks: bool
    stem_channels: int
    num_classes: int
    head: str

    @property
    def variant(self) -> str | None:
        """Name of the variant with these layers, planes and bottlenecks; None if there is none."""
        for name in VARIANTS:
            config = make_config(name)
            if self[:3] == (config.layers, config.planes, config.bottlenecks):
                return name
        return None

    def __str__(self) -> str:
        stages = "-".join(map(str, self.layers))
        name = self.variant or "a TResNet"
        return (
            f"{name} (stages {stages}, {self.planes} base channels, {self.stem_channels} stem "
            f"inputs, {self.num_classes} classes, head {self.head})"
        )


def architecture(config: ModelConfig) -> Architecture:
    """Return the `Architecture` of a model with this configuration."""
    return Architecture(
        layers=config.layers,
        planes=config.planes,
        bottlenecks=config.bottlenecks,
        stem_channels=config.in_chans * config.block_size**2,
        num_classes=config.num_classes,
        head=config.head if config.num_classes else "linear",
    )


def identify(tensors: Mapping[str, Tensor]) -> Architecture:
    """Return the `Architecture` that fits the names (this package's) and shapes of `tensors`."""
    blocks: list[set[str]] = [set(), set(), set(), set()]  # indices of blocks in each stage
    for key in tensors:
        match = re.match(r"body\.layer([1-4])\.(\d+)\.", key)
        if match:
            blocks[int(match[1]) - 1].add(match[2])
    stem = tensors.get("body.conv1.conv.weight")
    shape = stem.shape if stem is not None and stem.dim() == 4 else (0, 0)
    # timm's ML-Decoder has no head.fc.weight; duplicate_pooling_bias has one value per class
    outputs = [tensors.get(f"head.fc.{name}") for name in ("weight", "duplicate_pooling_bias")]
    classes = [len(tensor) for tensor in outputs if tensor is not None and tensor.dim()]
    head = "group_attention" if "head.reduce.conv.weight" in tensors else "linear"
    return Architecture(
        layers=(len(blocks[0]), len(blocks[1]), len(blocks[2]), len(blocks[3])),
        planes=shape[0],
        bottlenecks=any(key.startswith("body.layer1.0.conv3.") for key in tensors),
        stem_channels=shape[1],
        num_classes=classes[0] if classes else 0,
        head="ml_decoder" if "head.fc.embed_standart.weight" in tensors else head,
    )
