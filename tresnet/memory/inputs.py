"""Describe the inputs of models that take no images, by shape and dtype of each tensor."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import InputError


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """Stands in for a batch of images: the tensors of one model call, by position or name."""

    tensors: dict[int | str, Tensor]
    dtype: None = None

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def to(self, device: torch.device, dtype: torch.dtype, **_: Any) -> "ModelArguments":
        """Move all tensors to `device`, and convert floating-point tensors to `dtype`."""
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
    """Shape per sample and dtype of each argument of a model, by position or name."""

    shapes: dict[int | str, tuple[tuple[int, ...], torch.dtype]]

    def batch(self, batch_size: int) -> ModelArguments:
        """Return a batch of uninitialised tensors on the CPU, with the batch dimension first."""
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
    """Parse the value of `StepPlan.inputs`; raise `InputError` if it is not valid."""
    if _form(given) is not None:
        given = [given]
    if isinstance(given, tuple | list):
        given = dict(enumerate(given))
    forms = {k: _form(one) for k, one in given.items()} if isinstance(given, Mapping) else {}
    if not forms or None in forms.values():
        raise InputError(
            "inputs: expected for each argument of the model an example tensor, the batch first, "
            f"or the shape of a sample and a dtype, such as ((128,), torch.int64), got {given!r}"
        )
    return InputShapes({key: form for key, form in forms.items() if form is not None})


def _form(one: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the shape of one sample and the dtype; None if `one` does not describe an argument."""
    match one:
        case Tensor() if one.dim():
            return tuple(one.shape[1:]), one.dtype
        case [[*shape], torch.dtype() as dtype] if all(isinstance(n, int) and n > 0 for n in shape):
            return tuple(shape), dtype
    return None
