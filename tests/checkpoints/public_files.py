"""Rebuild files that others have published, with values of a rule, and the logits of their code.

`tests/golden/published.json` holds, for each file, the names, shapes and kinds of its tensors, what
the file holds beside them, and logits that its authors' own code computed in float64. The values of
a tensor follow from its name, so that no weights are stored.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DESCRIBED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "published.json").read_text(encoding="utf-8")
)
LINE = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)


class Published(NamedTuple):
    contents: Any  # what torch.save wrote
    images: Tensor  # (2, 3, S, S), float64
    logits: Tensor  # (2, 100), float64: the first outputs of each image
    std: float  # of all outputs


def values(name: str, shape: list[int], kind: str) -> Tensor:
    """Return the float64 values of a tensor; `kind` is its part in the model."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    fan_in = max(math.prod(shape[1:]), 1)
    match kind:
        case "var":
            return 0.75 + 0.5 * uniform
        case "gamma":
            return 0.3 + 0.6 * uniform
        case "signed":  # a weight of in-place ABN, a third of which are negative
            return (0.3 + 0.6 * uniform) * torch.where(normal < -0.25, -1.0, 1.0)
        case "mean" | "vector":
            return 0.1 * normal
        case "blur":
            return torch.outer(LINE, LINE).expand(shape).clone()
        case "counter":
            return torch.zeros(shape, dtype=torch.int64)
        case _:
            return normal * math.sqrt((2 if len(shape) == 4 else 1) / fan_in)


def images(side: int) -> Tensor:
    """Return two smooth images (2, 3, side, side) in [0, 1]."""
    channel, row, column = (torch.arange(float(size)) for size in (3, side, side))
    phase = 0.05 * row[:, None] + 0.08 * (channel + 1)[:, None, None] * column
    first = (0.5 + 0.5 * torch.sin(phase)).double()
    return torch.stack([first, first**3 * column / side])


def described(name: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, kind and shape of each tensor of a published file."""
    for blocks, lines in DESCRIBED[name]["tensors"]:  # blocks of equal tensors
        for block, line in itertools.product(blocks.split(" "), lines.split(" ")):
            key, kind, *shape = (block + line).split("|")
            yield key, kind, list(map(int, shape))


def empty(name: str) -> dict[str, Tensor]:
    """Return zeros that take no memory as a published file's tensors; filters have values."""
    dtypes = {"counter": torch.int64}
    return {
        key: values(key, shape, kind)
        if kind == "blur"
        else torch.zeros((), dtype=dtypes.get(kind, torch.float32)).expand(shape)
        for key, kind, shape in described(name)
    }


def in_form(name: str, tensors: dict[str, Tensor]) -> Any:
    """Return what the authors' `torch.save` got: the tensors in dicts, beside names of classes."""
    file = DESCRIBED[name]
    parts = {"STATE": tensors, "NAMES": {i: f"name {i}" for i in range(file["outputs"])}}
    form = file["form"]
    if not isinstance(form, dict):
        return tensors
    return {key: dict(parts[v]) if v in parts else v for key, v in form.items()}


def rebuild(name: str) -> Published:
    """Return a published file's contents, and what its authors' code computed from them."""
    file = DESCRIBED[name]
    prefix = file["prefix"]
    rows = described(name)
    tensors = {key: values(key.removeprefix(prefix), shape, kind) for key, kind, shape in rows}
    contents = in_form(name, tensors)
    first = [list(map(float, row.split())) for row in file["first"]]
    logits = torch.tensor(first, dtype=torch.float64)
    return Published(contents, images(file["side"]), logits, file["std"])
