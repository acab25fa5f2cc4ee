"""Table of the formats of files of weights, and the renaming of their tensors to our names.

Our names of the body are timm's. The rows of `FORMATS` whose mark a file's keys match are the
file's format: one row for the body, and at most one for the head. A name that is neither ours nor
renamed by a row is kept as in the file, after `UNKNOWN`, and `fit` refuses it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tresnet.checkpoints.read import UNKNOWN
from tresnet.errors import CheckpointError

INPLACE_ABN_EPS = 1e-5
# Prefix of a convolution and norm in the authors' code; a final `.0` means that a blur follows.
_LAYER = r"(body\.(?:conv1|layer\d+\.\d+\.(?:conv|downsample\.)\d))(?:\.0)?"
_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_CONV = rf"{_LAYER}\.0\.weight", r"\1.conv.weight"
_FILTER = rf"{_LAYER}\.1(?:\.op)?\.filt", ""
_LINEAR = r"(weight|bias)"
_QUERIES = r"((?:embed_standart|query_embed)\.(?:weight|bias)|duplicate_pooling(?:_bias)?)"
_ATTENTION = (
    r"(layers\.0\.(?:(?:norm|linear)\d\.|multihead_attn\.(?:in_proj_|out_proj\.))(?:weight|bias))"
)
_BLUR = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], device="cpu") / 16
OUR_NAMES = re.compile(
    rf"body\.(conv1|layer[1-4]\.\d+\.(conv[123]|downsample\.\d))\.(conv\.weight|bn\.{_NORM})"
    rf"|body\.layer[1-4]\.\d+\.se\.fc[12]\.{_LINEAR}"
    rf"|head\.(fc\.(([01]\.)?{_LINEAR}|{_QUERIES}|decoder\.{_ATTENTION})|(reduce|attention)\..+)"
)


class Format(NamedTuple):
    """Names by which a public code saves a model's body or head, and what follows from them."""

    format: str  # 'timm' or 'public': the names of the body; '' for a row of the head
    origin: str  # whose names these are
    mark: str  # pattern of beginnings of keys that no other row has
    names: tuple[tuple[str, str], ...] = ()  # patterns of whole keys, and our names ('': a blur)
    in_place: bool = False  # norms store the weight w of in-place ABN: gamma = |w| + 1e-5
    several_labels: bool = False  # an image may have several labels
    refusal: str = ""  # layers that this package does not have


_NORMS = rf"{_LAYER}\.1\.{_NORM}"
_PLAIN_NORMS = rf"{_LAYER}\.1\.bn\.{_NORM}"
_DECODER = (
    (rf"head\.decoder\.{_ATTENTION}", r"head.fc.decoder.\1"),
    (rf"head\.(?:decoder\.)?{_QUERIES}", r"head.fc.\1"),
)
_TWO_LAYERS = (
    (rf"head\.fc\.embedding_generator\.0\.{_LINEAR}", r"head.fc.0.\1"),
    (rf"head\.fc\.FC\.{_LINEAR}", r"head.fc.1.\1"),
)
_TIMM = Format(
    "timm", "timm's names", r"body\.(layer\d+\.\d+\.)?(conv\d|downsample\.\d)\.(conv|bn)\."
)
FORMATS = (
    _TIMM,
    Format(
        "public",
        "the TResNet authors' names",
        _NORMS,
        (_CONV, (_NORMS, r"\1.bn.\2"), _FILTER),
        in_place=True,
    ),
    Format(
        "public",
        "the TResNet authors' names with plain norms",
        _PLAIN_NORMS,
        (_CONV, (_PLAIN_NORMS, r"\1.bn.\2"), _FILTER),
    ),
    Format(
        "frelu",
        "ML-Danbooru's names with FReLU",
        r"body\..*\.depthwise_conv_bn\.",
        refusal="activations FReLU (depthwise convolutions)",
    ),
    Format(
        "",
        "an ML-Decoder by its authors",
        rf"head\.decoder\.{_QUERIES}",
        _DECODER,
        several_labels=True,
    ),
    Format("", "an ML-Decoder by timm's add_ml_decoder_head", rf"head\.{_QUERIES}", _DECODER),
    Format(
        "",
        "the two-layer head of ASL and PartialLabelingCSL",
        r"head\.fc\.(embedding_generator|FC)\.",
        _TWO_LAYERS,
        several_labels=True,
    ),
)


def rename(
    path: Path, tensors: Mapping[str, Tensor], prefix: str = ""
) -> tuple[dict[str, Tensor], list[Format]]:
    """Rename a file's tensors to our names, and convert in-place ABN's weights to gammas.

    The second value has the rows of `FORMATS` that apply, the body's first. `prefix` stands in the
    file before the names. CheckpointError: names of two formats are mixed; two names mean one
    tensor; or the model has layers that we have not.
    """
    rows = _formats(path, tensors)
    patterns = [(re.compile(pattern), name) for row in rows for pattern, name in row.names]
    patterns.append((OUR_NAMES, r"\g<0>"))
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if key.startswith(UNKNOWN):
            renamed[key] = value
            continue
        matches = ((pattern.fullmatch(key), name) for pattern, name in patterns)
        names = (match.expand(name) for match, name in matches if match)
        part = "body." if key.startswith("body.") else ""
        name = next(names, f"{part}{UNKNOWN}{prefix}{key}")
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
        if rows[0].in_place and name.endswith(".bn.weight"):  # 16 bits would round 1e-5 away
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            value = wide.abs() + INPLACE_ABN_EPS
        renamed[name] = value
    return renamed, rows


def _formats(path: Path, tensors: Mapping[str, Tensor]) -> list[Format]:
    """Return the rows of `FORMATS` of a file, the body's first; timm's for unknown names."""
    marked = {row: list(filter(re.compile(row.mark).match, tensors)) for row in FORMATS}
    rows = [row for row, keys in marked.items() if keys]
    for row in rows:
        if row.refusal:
            raise CheckpointError(
                f"{path} holds {row.refusal}, which this package does not have: "
                f"{len(marked[row])} tensors such as {marked[row][0]}. Of ML-Danbooru's files, "
                "take one without FReLU"
            )
    bodies = [row for row in rows if row.format]
    if len(bodies) > 1:
        names = (f"{row.origin} (such as {marked[row][0]})" for row in bodies)
        raise CheckpointError(f"{path} mixes {' with '.join(names)}: save the weights of one model")
    strided = [key for key in tensors if re.match(r"body\.layer[234]\.0\.conv\d\.0\.", key)]
    if strided and not any(key.endswith(".0.0.weight") for key in strided):
        raise CheckpointError(
            f"{path} holds strided convolutions without a blur ({strided[0]}), as TResNets without "
            "anti-aliasing do, which this package does not have: other outputs would be computed"
        )
    return rows if bodies else [_TIMM, *rows]
