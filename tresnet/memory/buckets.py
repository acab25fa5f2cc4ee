"""DistributedDataParallel's gradient buckets: flat copies of the gradients, for all-reduce."""

import torch
from torch import nn

from tresnet.memory.plan import Plan
from tresnet.memory.sizes import MIB

# The first bucket is small, so that communication starts early.
_FIRST_BUCKET_BYTES = MIB


class Buckets:
    """The buckets of one model, as the reducer lays them out.

    Built over the reversed parameters; rebuilt after the first backward pass in the order in
    which gradients arrived. With `ddp_bucket_view` gradients are views into them.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._order: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._order.reverse()
        self._limit_bytes = plan.ddp_bucket_bytes
        self._as_view = plan.ddp_bucket_view
        self._arrived: list[torch.Tensor] = []
        self._flat: list[torch.Tensor] = []
        self._places: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}

    def allocate(self) -> None:
        """One flat tensor for every run of parameters of one dtype up to the limit."""
        for group in _groups(self._order, self._limit_bytes):
            n_elements = sum(p.numel() for p in group)
            flat = torch.empty(n_elements, dtype=group[0].dtype, device=group[0].device)
            self._flat.append(flat)
            offset = 0
            for parameter in group:
                self._places[parameter] = flat, offset
                offset += parameter.numel()

    def rebuild(self) -> None:
        """Lay the buckets out again, in the order in which gradients arrived."""
        rest = [p for p in self._order if all(p is not q for q in self._arrived)]
        self._order = [*self._arrived, *rest]
        self._flat.clear()
        self._places.clear()
        self.allocate()

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """Copy the gradient to its place; let go of it if gradients are views."""
        if all(parameter is not p for p in self._arrived):
            self._arrived.append(parameter)
        if self._as_view:
            flat, offset = self._places[parameter]
            view = flat.narrow(0, offset, parameter.numel())
            parameter.grad = view.as_strided(
                parameter.shape, parameter.stride(), view.storage_offset()
            )


def _groups(parameters: list[torch.Tensor], limit_bytes: int) -> list[list[torch.Tensor]]:
    """Parameters by bucket: a bucket closes once it holds its limit, dtypes apart."""
    groups: list[list[torch.Tensor]] = []
    open_groups: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype = parameter.dtype
        open_groups.setdefault(dtype, []).append(parameter)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
        if sizes[dtype] >= limits.get(dtype, min(_FIRST_BUCKET_BYTES, limit_bytes)):
            groups.append(open_groups.pop(dtype))
            sizes[dtype], limits[dtype] = 0, limit_bytes
    return groups + list(open_groups.values())
