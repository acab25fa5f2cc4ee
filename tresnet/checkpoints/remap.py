"""Table of the formats of files of weights, and the renaming of their tensors to this package's.

This package's names of the body are timm's. A file's format is all rows of `FORMATS` whose mark one
of its keys matches: one row for the body, and at most one for the head. Keys that no row renames
stay as they are; `tresnet.checkpoints.load.fit` then names them in an error.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.read import Contents, by_prefix, read_file
from tresnet.errors import CheckpointError, InputError
from tresnet.models.zoo import VARIANTS, make_config
from tresnet.settings.model import ModelConfig

INPLACE_ABN_EPS = 1e-5
# Negative slopes of the code that wrote files without metadata: timm's and the authors'. A new
# model's defaults, in `ModelConfig`, have the values of `SLOPES`, but may change without these.
SLOPES = {"stem_slope": 1e-2, "block_slope": 1e-3}
# Of all published files, only TResNet's tresnet_v2_l of 196 cars has other slopes.
_CARS = "tresnet_v2_l", 196, "linear"
_SLOPES_OF_CARS = {"stem_slope": 1e-6, "block_slope": 1e-6}

# Prefix of a convolution and norm in the authors' code; a final `.0` means that a blur follows.
_CONV_NORM = r"(body\.(?:conv1|layer\d+\.\d+\.(?:conv|downsample\.)\d))(?:\.0)?"
_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_AUTHORS_CONV = rf"{_CONV_NORM}\.0\.weight", r"\1.conv.weight"
_AUTHORS_BLUR = rf"{_CONV_NORM}\.1(?:\.op)?\.filt", ""
_LINEAR = r"(?:weight|bias)"
_DECODER = rf"((?:embed_standart|query_embed)\.{_LINEAR}|duplicate_pooling(?:_bias)?)"
_LAYERS = (
    rf"(layers\.\d+\.(?:(?:norm|linear)\d\.|multihead_attn\.(?:in_proj_|out_proj\.)){_LINEAR})"
)
_BLUR = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], device="cpu") / 16


@dataclass(frozen=True)
class Format:
    """Names by which a public code saves a model's body or head, and what follows from them."""

    format: str  # 'timm' or 'public': the names of the body; '' for a row of the head
    origin: str  # whose code has these names
    mark: str  # pattern of keys, or of their beginnings, that no other row has
    names: tuple[tuple[str, str], ...] = ()  # patterns of whole keys, and our names ('': a blur)
    in_place: bool = False  # norms store the weight w of in-place ABN: gamma = |w| + eps
    several_labels: bool = False  # an image may have several labels
    refusal: str = ""  # why such a file cannot be loaded


FORMATS = (
    Format(
        "timm",
        "timm's names",
        r"body\.(layer\d+\.\d+\.)?(conv\d|downsample\.\d)\.(conv|bn)\.",
    ),
    Format(
        "public",
        "the TResNet authors' names",  # arXiv 1712.02616 and the package inplace-abn for gamma
        rf"{_CONV_NORM}\.1\.{_NORM}",
        (_AUTHORS_CONV, (rf"{_CONV_NORM}\.1\.{_NORM}", r"\1.bn.\2"), _AUTHORS_BLUR),
        in_place=True,
    ),
    Format(
        "public",
        "the TResNet authors' names with plain batch norms",
        rf"{_CONV_NORM}\.1\.bn\.{_NORM}",
        (_AUTHORS_CONV, (rf"{_CONV_NORM}\.1\.bn\.{_NORM}", r"\1.bn.\2"), _AUTHORS_BLUR),
    ),
    Format(
        "frelu",
        "ML-Danbooru's names with FReLU",
        r"body\..*\.depthwise_conv_bn\.",
        refusal="activations FReLU (depthwise convolutions), which this package does not have",
    ),
    Format(
        "",
        "an ML-Decoder by its authors",
        rf"head\.decoder\.{_DECODER}",
        (
            (rf"head\.decoder\.{_LAYERS}", r"head.fc.decoder.\1"),
            (rf"head\.decoder\.{_DECODER}", r"head.fc.\1"),
        ),
        several_labels=True,
    ),
    Format(
        "",
        "an ML-Decoder by timm's add_ml_decoder_head",
        rf"head\.{_DECODER}",
        (
            (rf"head\.decoder\.{_LAYERS}", r"head.fc.decoder.\1"),
            (rf"head\.{_DECODER}", r"head.fc.\1"),
        ),
    ),
    Format(
        "",
        "the two-layer head of ASL and PartialLabelingCSL",
        r"head\.fc\.(embedding_generator|FC)\.",
        (
            (rf"head\.fc\.embedding_generator\.0\.({_LINEAR})", r"head.fc.0.\1"),
            (rf"head\.fc\.FC\.({_LINEAR})", r"head.fc.1.\1"),
        ),
        several_labels=True,
    ),
)
# The first patterns that names of a head match determine its kind; none: a linear head.
_HEADS = {
    "ml_decoder": r"head\.fc\.(decoder|embed_standart|query_embed|duplicate_pooling)",
    "bottleneck": r"head\.fc\.[01]\.",
    "group_attention": r"head\.(reduce|attention)\.",
}
_KNOWN = re.compile(
    r"body\.(conv1|layer[1-4]\.\d+\.(conv[1-3]|downsample\.\d))\.(conv\.weight|bn\.\w+)"
)


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
    origin: str  # names of the rows of `FORMATS`
    slopes_source: str  # why the slopes are these
    prefix: str = ""  # what the file's names have before `body.` and `head.`
    beside: tuple[str, ...] = ()  # names of the file's tensors that are outside the TResNet
    user: dict[str, Any] = field(default_factory=dict)  # names of classes, and kind of labels
    metadata: dict[str, Any] = field(default_factory=dict)
    config: ModelConfig | None = None

    @property
    def has_other_layers(self) -> bool:
        """Whether the file holds a head or other layers that this package does not know."""
        of_head = any(name.startswith("head.") for name in self.tensors)
        return bool(self.beside) or (of_head and not identify(self.tensors).num_classes)

    @property
    def block_size(self) -> int | None:
        """Side of the stem's blocks, or None if the file does not determine it."""
        if self.config is None:
            return 4 if self.format == "public" else None
        return self.config.block_size


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read a file of weights in our, timm's or the public format, and convert names and gammas."""
    return to_ours(Path(path), read_file(path))


def to_ours(path: Path, contents: Contents) -> Weights:
    """Rename a file's tensors to this package's names; convert in-place ABN's weights to gammas.

    CheckpointError: names of two formats are mixed, or two names mean one tensor; the model has
    layers that this package has not; or the metadata are wrong.
    """
    rows = _formats(path, contents.tensors)
    tensors = _rename(path, contents.tensors, rows)
    origin = " and ".join(row.origin for row in rows)
    stored = identify(tensors)
    if contents.metadata:
        return _with_metadata(path, contents, tensors, stored)
    user: dict[str, Any] = {}
    if contents.classes is not None:
        user["classes"] = list(contents.classes)
    if any(row.several_labels for row in rows) or contents.classes is not None:
        # The published files of one label are those of 196 cars and of ImageNet.
        user |= {} if stored.num_classes in (196, 1000, 11221) else {"labels": "multi"}
    slopes, source = SLOPES, "as in the code that has such names"
    of_cars = (stored.variant, stored.num_classes, stored.head) == _CARS
    if of_cars and rows[0].in_place and contents.classes is None:
        slopes, source = _SLOPES_OF_CARS, "as TResNet's file of 196 cars has, alone of all files"
    return Weights(
        path,
        rows[0].format,
        tensors,
        slopes,
        origin,
        source,
        contents.prefix,
        contents.beside,
        user,
    )


def _with_metadata(
    path: Path, contents: Contents, tensors: dict[str, Tensor], stored: "Architecture"
) -> Weights:
    metadata = contents.metadata or {}
    try:
        config = check_metadata(metadata)
    except InputError as error:
        raise CheckpointError(
            f"{path} has metadata that this version of tresnet cannot use ({error}): "
            "upgrade tresnet, or save the file again"
        ) from error
    stated = architecture(config)
    if stated != stored:
        raise CheckpointError(
            f"{path} says it holds {stated}, but its tensors are of {stored}: it is damaged; "
            "copy or download it again"
        )
    return Weights(
        path,
        "tresnet",
        tensors,
        {name: getattr(config, name) for name in SLOPES},
        "this package",
        "as the file states",
        contents.prefix,
        contents.beside,
        metadata.get("user", {}),
        metadata,
        config,
    )


def _formats(path: Path, keys: Mapping[str, Tensor]) -> list[Format]:
    """Return the rows of `FORMATS` of a file, the body's first; timm's for unknown names."""
    first = {row: next(filter(re.compile(row.mark).match, keys), None) for row in FORMATS}
    rows = [row for row, key in first.items() if key is not None]
    for row in rows:
        if row.refusal:
            count = sum(re.match(row.mark, key) is not None for key in keys)
            raise CheckpointError(
                f"{path} holds {row.refusal}: {count} tensors such as {first[row]}. Of "
                "ML-Danbooru's files, take one without FReLU"
            )
    bodies = [row for row in rows if row.format]
    if len(bodies) > 1:
        raise CheckpointError(
            f"{path} mixes {bodies[0].origin} (such as {first[bodies[0]]}) with "
            f"{bodies[1].origin} (such as {first[bodies[1]]}): save the weights of one model"
        )
    return rows if bodies else [FORMATS[0], *rows]


def _rename(path: Path, tensors: Mapping[str, Tensor], rows: list[Format]) -> dict[str, Tensor]:
    patterns = [(re.compile(pattern), name) for row in rows for pattern, name in row.names]
    in_place = any(row.in_place for row in rows)
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        matches = ((pattern.fullmatch(key), name) for pattern, name in patterns)
        name = next((match.expand(name) for match, name in matches if match), key)
        if not name:
            wrong = value.shape[1:] != (1, 3, 3) or (value.to("cpu", torch.float) != _BLUR).any()
            if bool(wrong):
                raise CheckpointError(
                    f"{path}: {key} is not the 3x3 binomial blur that every TResNet has, so the "
                    "file belongs to another model"
                )
            continue
        if name in renamed:
            raise CheckpointError(f"{path} holds two tensors for one name of the model: {key}")
        if in_place and name.endswith(".bn.weight"):  # 16-bit dtypes would round the 1e-5 away
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            value = wide.abs() + INPLACE_ABN_EPS
        renamed[name] = value
    return renamed


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
    head = head_kind(tensors)
    return Architecture(
        layers=(len(blocks[0]), len(blocks[1]), len(blocks[2]), len(blocks[3])),
        planes=shape[0],
        bottlenecks=any(key.startswith("body.layer1.0.conv3.") for key in tensors),
        stem_channels=shape[1],
        num_classes=_count_classes(head, tensors),
        head=head,
    )


def head_kind(keys: Iterable[str]) -> str:
    """Return the kind of a head with these names: a value of `ModelConfig.head`."""
    keys = [key for key in keys if key.startswith("head.")]
    kinds = (kind for kind, mark in _HEADS.items() if any(re.match(mark, key) for key in keys))
    return next(kinds, "linear")


def _count_classes(head: str, tensors: Mapping[str, Tensor]) -> int:
    names = {
        "ml_decoder": ("duplicate_pooling_bias",),  # the authors' decoders have no fc.weight
        "bottleneck": ("1.weight", "1.bias"),
    }.get(head, ("weight", "bias"))
    outputs = [tensors.get(f"head.fc.{name}") for name in names]
    classes = [len(tensor) for tensor in outputs if tensor is not None and tensor.dim()]
    weight = tensors.get("head.fc.duplicate_pooling")
    if not classes and weight is not None and weight.dim() == 3:
        return weight.shape[0] * weight.shape[2]  # the bias will be said to be missing
    return classes[0] if classes else 0


def unknown_of_body(weights: Weights) -> str:
    """Return names that no body has, by their prefixes, for a message; '' without such names."""
    keys = weights.tensors
    odd = [k for k in keys if not k.startswith("head.") and not _KNOWN.fullmatch(k)]
    odd = [k for k in odd if not re.fullmatch(r"body\.layer\d\.\d+\.se\.fc\d\.\w+", k)]
    odd = [weights.prefix + key for key in odd] + [*weights.beside]
    return f". Unknown: {by_prefix(odd)}" if odd else ""
