"""A convolution in groups that may run in more than one way."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError

GroupedImpl = Literal["conv", "matmul", "loop"]
IMPLS = ("conv", "matmul", "loop")


class GroupedConv2d(nn.Conv2d):
    """`nn.Conv2d`, run as one grouped convolution, one batched matrix product, or one by one.

    Which is fastest depends on device, library and shape: `tresnet.surgery.pick_fastest` measures.
    The function and the parameters are the same.

    Attributes:
        impl: 'conv' is `nn.Conv2d`'s own; 'matmul' is for 1x1 with stride 1; 'loop' convolves group
            by group and concatenates.
    """

    impl: GroupedImpl = "conv"

    def impls(self) -> tuple[GroupedImpl, ...]:
        """Return the ways this convolution can run."""
        if self.groups == 1 or self.padding_mode != "zeros":
            return ("conv",)
        pointwise = self.kernel_size == (1, 1) and self.stride == (1, 1)
        if pointwise and self.padding in ((0, 0), "same", "valid"):
            return IMPLS
        return ("conv", "loop")

    def use(self, impl: GroupedImpl) -> None:
        """Choose how to run.

        Raises:
            InputError: this convolution cannot run like that.
        """
        if impl not in self.impls():
            raise InputError(f"expected impl out of {', '.join(self.impls())}, got {impl!r}")
        self.impl = impl

    def forward(self, input: Tensor) -> Tensor:
        """(N, in, H, W) to (N, out, H', W')."""
        if torch.jit.is_scripting():
            return self._conv_forward(input, self.weight, self.bias)
        if self.impl == "matmul":
            return self._product(input)
        if self.impl == "loop":
            return self._one_by_one(input)
        return super().forward(input)

    def _product(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        y = self.weight.reshape(self.groups, -1, self.weight.shape[1]) @ x.reshape(
            n, self.groups, -1, h * w
        )
        y = y.reshape(n, -1, h, w)
        return y if self.bias is None else y + self.bias[:, None, None].to(y.dtype)

    def _one_by_one(self, x: Tensor) -> Tensor:
        biases = [None] * self.groups if self.bias is None else self.bias.chunk(self.groups)
        parts = zip(x.chunk(self.groups, 1), self.weight.chunk(self.groups), biases, strict=True)
        settings: tuple[Any, ...] = (self.stride, self.padding, self.dilation)
        return torch.cat([F.conv2d(x, w, b, *settings) for x, w, b in parts], dim=1)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return f"{super().extra_repr()}, impl={self.impl!r}"
