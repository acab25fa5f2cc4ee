"""Inputs of models that take no images: tensors by shape and dtype, with the batch first."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import InputError


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """Arguments of one call of a model, by position or name; a step treats them as images."""

    tensors: dict[int | str, Tensor]
    dtype: None = None

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def to(self, device: torch.device, dtype: torch.dtype, **_: Any) -> "ModelArguments":
        """Move the tensors; those of floats get the dtype."""
        return ModelArguments(
            {
                key: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
                for key, tensor in self.tensors.items()
            }
        )

    def unpacked(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and the named arguments."""
        tensors = self.tensors.items()
        named = {key: tensor for key, tensor in tensors if isinstance(key, str)}
        return tuple(tensor for key, tensor in tensors if isinstance(key, int)), named


@dataclasses.dataclass(frozen=True)
class InputShapes:
    """Shapes of one sample and dtypes of a model's arguments, by position or by name."""

    shapes: dict[int | str, tuple[tuple[int, ...], torch.dtype]]

    def batch(self, batch_size: int) -> ModelArguments:
        """Return a batch on the CPU."""
        return ModelArguments(
            {
                key: torch.empty((batch_size, *shape), dtype=dtype)
                for key, (shape, dtype) in self.shapes.items()
            }
        )

    def __str__(self) -> str:
        return " and ".join(
            f"{'x'.join(map(str, shape)) or 'one'} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in self.shapes.values()
        )


def read_inputs(given: Any) -> InputShapes:
    """Return the inputs that `StepPlan.inputs` describes, or raise `InputError`."""
    if isinstance(given, Tensor) or _is_shape(given):
        given = [given]
    if isinstance(given, tuple | list):
        given = dict(enumerate(given))
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"inputs: {_EXPECTED}, got {type(given).__name__}")
    shapes = {}
    for key, one in given.items():
        if isinstance(one, Tensor) and one.dim():
            shapes[key] = tuple(one.shape[1:]), one.dtype
        elif _is_shape(one):
            shapes[key] = tuple(one[0]), one[1]
        else:
            raise InputError(f"inputs: {_EXPECTED}, got {one!r}")
    return InputShapes(shapes)


_EXPECTED = (
    "expected for each argument of the model an example tensor, the batch first, or the shape of "
    "a sample and a dtype, such as ((128,), torch.int64)"
)


def _is_shape(one: Any) -> bool:
    return (
        isinstance(one, tuple | list)
        and len(one) == 2
        and isinstance(one[1], torch.dtype)
        and isinstance(one[0], tuple | list)
        and all(isinstance(size, int) and size > 0 for size in one[0])
    )
