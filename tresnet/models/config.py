"""What determines a model."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tresnet.errors import InputError
from tresnet.models.heads import HEADS, check_class_groups

STEM_SLOPE, BLOCK_SLOPE = 1e-2, 1e-3


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a model's parameters and its function.

    Attributes:
        variant: name in the table of variants.
        layers: blocks in each of the four stages.
        width_factor: channels of the first stage over 64.
        bottlenecks: bottleneck blocks in the first two stages too (version 2).
        block_size: side of the space-to-depth block of the stem.
        in_chans: channels of the image.
        num_classes: width of the classifier; 0 for none.
        norm: 'abn', 'batchnorm' or 'inplace_abn'.
        jit: run the helper functions as TorchScript.
        head: 'linear', 'group_attention' or 'ml_decoder'.
        head_groups: classes of each group, of 'group_attention'.
        head_channels: channels of each group of 'group_attention' (None: 512), or width of the
            decoder of 'ml_decoder' (None: 768).
        global_pool: pooling in front of the linear head.
        drop_rate: dropout in front of the classifier; 'ml_decoder' has its own.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0 at the first.
        stem_slope: negative slope of the stem's leaky ReLU.
        block_slope: negative slope of the blocks' leaky ReLUs.
    """

    variant: str
    layers: tuple[int, int, int, int]
    width_factor: float = 1.0
    bottlenecks: bool = False
    block_size: int = 4
    in_chans: int = 3
    num_classes: int = 1000
    norm: str = "abn"
    jit: bool = False
    head: str = "linear"
    head_groups: tuple[int, ...] = ()
    head_channels: int | None = None
    global_pool: str = "avg"
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    stem_slope: float = STEM_SLOPE
    block_slope: float = BLOCK_SLOPE

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: a value is out of range.
        """
        if len(self.layers) != 4 or min(self.layers) < 1:
            raise InputError(f"expected layers as four numbers of at least 1, got {self.layers}")
        if not math.isfinite(self.width_factor) or self.planes < 1:
            raise InputError(f"expected a width_factor of at least 1/64, got {self.width_factor}")
        for name in ("block_size", "in_chans"):
            if getattr(self, name) < 1:
                raise InputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.num_classes < 0:
            raise InputError(f"expected num_classes of 0 or more, got {self.num_classes}")
        for name in ("drop_rate", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"expected {name} in [0, 1), got {getattr(self, name)}")
        self._check_head()

    def _check_head(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"expected head out of {', '.join(HEADS)}, got {self.head!r}")
        if self.head == "linear" and self.head_channels is not None:
            raise InputError(
                f"head_channels={self.head_channels} needs head='group_attention' or 'ml_decoder'"
            )
        if self.head_channels is not None and self.head_channels < 1:
            raise InputError(f"expected head_channels of at least 1, got {self.head_channels}")
        if self.head == "linear" or not self.num_classes:
            return
        if self.global_pool != "avg":
            raise InputError(
                f"head={self.head!r} has a pool of its own: expected global_pool='avg' (the "
                f"default), got {self.global_pool!r}"
            )
        if self.head == "group_attention":
            check_class_groups(self.head_groups, self.num_classes)
        elif self.drop_rate:
            raise InputError(
                f"head='ml_decoder' has dropout of its own: expected drop_rate=0, got "
                f"{self.drop_rate}"
            )

    @property
    def planes(self) -> int:
        """Channels of the stem; version 2 rounds to a multiple of 8."""
        planes = int(64 * self.width_factor)
        return (planes + 4) // 8 * 8 if self.bottlenecks else planes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        values = asdict(self)
        return {**values, "layers": list(self.layers), "head_groups": list(self.head_groups)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return the configuration that `to_dict` wrote."""
        layers, groups = tuple(values["layers"]), tuple(values.get("head_groups", ()))
        return cls(**{**values, "layers": layers, "head_groups": groups})
