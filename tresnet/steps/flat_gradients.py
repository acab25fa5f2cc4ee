"""Gradients of several processes, averaged after backward by one collective per dtype and device.

A step that replays CUDA graphs uses this class in place of DistributedDataParallel, whose
collectives start during backward. A hang in a captured collective could not be told from a slow
one, so no collective is captured.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tresnet.errors import InputError

# Elements; multi-tensor kernels of PyTorch read four at once where all tensors are aligned.
_ALIGNMENT = 4


class FlatGradients:
    """Flat memory for the gradients of the parameters that required a gradient at construction.

    flat tensor of a dtype and device:  | grad of parameter 0 | grad of parameter 1 | zeros | ...
    """

    def __init__(self, model: nn.Module) -> None:
        """Allocate the memory: as many bytes as the parameters have, and padding of zeros."""
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in self._named.values():
            groups[parameter.dtype, parameter.device].append(parameter)
        self._parameters = [parameter for group in groups.values() for parameter in group]
        self._flat: list[Tensor] = []
        self._views: list[Tensor] = []
        for group in groups.values():
            sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in group]
            flat = group[0].new_zeros(sum(sizes), requires_grad=False)
            self._flat.append(flat)
            for parameter, part in zip(group, flat.split(sizes), strict=True):
                # A gradient has the strides of its parameter, such as those of channels last.
                self._views.append(part.as_strided(parameter.shape, parameter.stride()))

    @torch.no_grad()
    def collect(self) -> None:
        """Copy all gradients to the flat memory, and replace `grad` of the parameters by views.

        Raises `InputError` if a parameter has no gradient, as DistributedDataParallel would.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) < len(self._parameters):
            unused = [name for name, p in self._named.items() if p.grad is None]
            raise InputError(
                f"expected a gradient of each of the {len(self._named)} trained parameters, got"
                f" none of {len(unused)}, such as {unused[0]}: exclude them with"
                " requires_grad_(False) before the step is created"
            )
        torch._foreach_copy_(self._views, gradients)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def average(self) -> None:
        """Replace all gradients by their means over the processes (a collective)."""
        self.collect()
        for flat in self._flat:
            # In this order, like DistributedDataParallel: the sum of fp16's scaled gradients may be
            # infinite, and two processes get DistributedDataParallel's bits.
            flat.mul_(1 / dist.get_world_size())
            dist.all_reduce(flat)
