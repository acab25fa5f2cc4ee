"""Parallel linear layers, each with an input and a number of outputs of its own."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tresnet.errors import InputError


class GroupedLinear(nn.Module):
    """G linear layers as one batched matrix product; layer g maps C features to n_g outputs.

    `weight` (n_1 + ... + n_G, C) and `bias` concatenate the weights and biases of the layers.
    Zeros pad each layer to max(n) outputs, so a sample costs G C max(n) multiply-accumulates.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weights; `in_features` (C) and all `out_features` must be at least 1."""
        super().__init__()
        self.in_features = in_features
        self.out_features = tuple(out_features)
        if in_features < 1 or not self.out_features or min(self.out_features) < 1:
            raise InputError(
                "expected in_features of at least 1 and at least one output for each group, got "
                f"in_features={in_features}, out_features={self.out_features}"
            )
        total = sum(self.out_features)
        self.weight = nn.Parameter(torch.empty(total, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(total, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @property
    def groups(self) -> int:
        return len(self.out_features)

    def reset_parameters(self) -> None:
        """Draw all values uniformly from -1 / sqrt(C) to 1 / sqrt(C), as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, G * C) or (N, G, C) to (N, n_1 + ... + n_G); other shapes raise `InputError`."""
        groups, features = self.groups, self.in_features
        if tuple(x.shape[1:]) not in ((groups * features,), (groups, features)):
            raise InputError(
                f"expected (N, {groups * features}) or (N, {groups}, {features}), got "
                f"{tuple(x.shape)}"
            )
        longest = max(self.out_features)
        x = x.reshape(x.shape[0], groups, features)
        if min(self.out_features) == longest:
            weight = self.weight.view(groups, longest, features)
            y = torch.einsum("ngc,goc->ngo", x, weight).flatten(1)
        else:
            parts = self.weight.split(self.out_features)
            weight = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
            y = torch.einsum("ngc,goc->ngo", x, weight)
            y = torch.cat([y[:, g, :count] for g, count in enumerate(self.out_features)], dim=1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
