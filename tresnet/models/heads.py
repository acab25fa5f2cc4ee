"""Classifier heads."""

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.global_pool import GlobalPool2d


class LinearHead(nn.Module):
    """Global pool, dropout, linear."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        pool_type: str = "avg",
        drop_rate: float = 0.0,
        jit: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create pool and linear layer.

        Args:
            in_features: channels C of the feature map (N, C, H, W).
            num_classes: width of the output; 0 returns the pooled features.
            pool_type: see `tresnet.layers.global_pool.GlobalPool2d`.
            drop_rate: probability of dropping a feature in training.
            jit: run the TorchScript form of the average pool.
            device: where the parameters live.
            dtype: floating-point type of the parameters.

        Raises:
            InputError: `num_classes` is negative, or there is a classifier but no pool.
        """
        super().__init__()
        if num_classes < 0:
            raise InputError(f"expected num_classes of 0 or more, got {num_classes}")
        if num_classes and not pool_type:
            raise InputError(
                "a classifier needs a global pool: expected num_classes=0 with no pool"
            )
        self.in_features = in_features
        self.drop_rate = drop_rate
        self.global_pool = GlobalPool2d(pool_type, jit)
        self.drop = nn.Dropout(drop_rate)
        self.fc = (
            nn.Linear(in_features, num_classes, device=device, dtype=dtype)
            if num_classes
            else nn.Identity()
        )
        if isinstance(self.fc, nn.Linear):
            nn.init.normal_(self.fc.weight, std=0.01)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, C, H, W) to (N, num_classes), or to the pooled features (N, C) if `pre_logits`."""
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)
