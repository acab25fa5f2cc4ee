"""Configuration of a model, and the optional arguments of `create` that set it.

A `ModelConfig` determines the parameters and the function of a model, and is saved in every
checkpoint. All values are checked, so that damaged or hostile files cannot request absurd models.
`ModelOptions` lists the arguments: all fields of `ModelConfig` but `variant` and `bottlenecks`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from tresnet.errors import InputError
from tresnet.layers.norm import norm_class

STEM_SLOPE, BLOCK_SLOPE = 1e-2, 1e-3
HEADS = ("linear", "group_attention", "ml_decoder")
DEFAULT_GROUPS = 12

# Smallest and largest valid value of integer fields. A damaged or hostile file can hold any number.
# A model within these bounds is built in seconds and fits into memory.
_RANGES = {
    "block_size": (1, 64),
    "in_chans": (1, 4096),
    "num_classes": (0, 10_000_000),
    "head_channels": (1, 65_536),
}
_MOST_BLOCKS, _MOST_PLANES = 1000, 4096


class ModelOptions(TypedDict, total=False):
    """Optional arguments of `create` and `build`; None keeps the value of the variant."""

    layers: Sequence[int] | None
    width_factor: float | None
    block_size: int | None
    in_chans: int | None
    num_classes: int | None
    norm: str | None
    jit: bool | None
    head: str | None
    head_groups: int | Sequence[int] | None
    head_channels: int | None
    global_pool: str | None
    drop_rate: float | None
    drop_path_rate: float | None
    stem_slope: float | None
    block_slope: float | None


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a model's parameters and its function.

    Attributes:
        variant: name in the table of variants, such as 'tresnet_m'.
        layers: number of blocks in each of the four stages.
        width_factor: number of the stem's output channels, divided by 64.
        bottlenecks: whether the first two stages have bottleneck blocks too, as in version 2.
        block_size: side of the stem's space-to-depth block; 2 suits images of about 32 pixels.
        in_chans: number of image channels.
        num_classes: number of classes; a model with 0 classes returns pooled features.
        norm: 'abn', 'batchnorm' or 'inplace_abn'; see `tresnet.layers.norm`.
        jit: run space-to-depth, blurs and average pools in TorchScript.
        head: kind of classifier: 'linear', 'group_attention' or 'ml_decoder'.
        head_groups: number of classes in each group of 'group_attention'. An integer is instead the
            number of groups, which then have about equal sizes. Default: 12 groups.
        head_channels: channels of each group of 'group_attention' (None: 512), or channels of the
            decoder of 'ml_decoder' (None: 768).
        global_pool: pooling before the linear classifier: 'avg', 'max', 'avgmax', or '' for none.
        drop_rate: dropout probability before the classifier; must be 0 for head 'ml_decoder'.
        drop_path_rate: rate of stochastic depth in the last block; the first block has rate 0.
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
        """Raise `InputError` for a bad value; turn `head_groups` into a tuple of group sizes."""
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        for name, fits, expected in self._requirements():
            if not fits:
                raise InputError(f"expected {name} {expected}, got {getattr(self, name)!r}")
        norm_class(self.norm)
        self._check_head()

    def _requirements(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the name of each field, whether its value is valid, and the valid values."""
        layers, head_channels = self.layers, self.head_channels
        four = isinstance(layers, tuple) and len(layers) == 4
        fits = four and all(_is_int(count, 1, _MOST_BLOCKS) for count in layers)
        yield "layers", fits, f"as four whole numbers from 1 to {_MOST_BLOCKS}"
        fits = _is_number(self.width_factor) and abs(self.width_factor) <= _MOST_PLANES
        fits = fits and 1 <= self.planes <= _MOST_PLANES
        yield "width_factor", fits, f"from 1/64 to {_MOST_PLANES // 64}"
        for name, (least, most) in _RANGES.items():
            fits = _is_int(getattr(self, name), least, most)
            fits = fits or (name == "head_channels" and head_channels is None)
            yield name, fits, f"as a whole number from {least} to {most}"
        for name in ("variant", "head", "global_pool"):
            yield name, isinstance(getattr(self, name), str), "as a name"
        for name in ("bottlenecks", "jit"):
            yield name, isinstance(getattr(self, name), bool), "as True or False"
        for name in ("stem_slope", "block_slope", "drop_rate", "drop_path_rate"):
            yield name, _is_number(getattr(self, name)), "as a finite number"
        for name in ("drop_rate", "drop_path_rate"):
            yield name, 0 <= getattr(self, name) < 1, "in [0, 1)"

    def _check_head(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"expected head out of {', '.join(HEADS)}, got {self.head!r}")
        if self.head == "linear" and self.head_channels is not None:
            raise InputError(
                f"head_channels={self.head_channels} needs head='group_attention' or 'ml_decoder'"
            )
        groups = class_groups(self.head, self.num_classes, self.head_groups or None)
        object.__setattr__(self, "head_groups", groups)
        if self.head == "linear" and self.num_classes and not self.global_pool:
            raise InputError(
                "a classifier needs a global pool: expected num_classes=0 with no pool"
            )
        if self.head == "linear" or not self.num_classes:
            return
        if self.global_pool != "avg":
            raise InputError(
                f"head={self.head!r} has a pool of its own: expected global_pool='avg' (the "
                f"default), got {self.global_pool!r}"
            )
        if self.head == "ml_decoder" and self.drop_rate:
            raise InputError(
                f"head='ml_decoder' has dropout of its own: expected drop_rate=0, got "
                f"{self.drop_rate}"
            )

    @property
    def planes(self) -> int:
        """Number of the stem's output channels, rounded to a multiple of 8 if `bottlenecks`."""
        planes = int(64 * self.width_factor)
        return (planes + 4) // 8 * 8 if self.bottlenecks else planes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        values = asdict(self)
        return {**values, "layers": list(self.layers), "head_groups": list(self.head_groups)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return the configuration that `to_dict` wrote, or raise `InputError`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"expected the fields of a ModelConfig, got {error}") from error


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def class_groups(
    kind: str, num_classes: int, groups: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the number of classes in each group of a head; raise `InputError` for bad `groups`.

    `kind` names the head; only 'group_attention' has groups. `groups` lists the number of classes
    of each group. An integer is the number of groups: their sizes differ by at most one, and larger
    groups come first. None means 12 groups, or `num_classes` groups if that is fewer than 12.
    """
    if kind != "group_attention":
        if groups:
            raise InputError(f"head_groups={groups} needs head='group_attention', got {kind!r}")
        return ()
    if num_classes == 0:
        return ()
    if groups is None or isinstance(groups, int):
        count = min(DEFAULT_GROUPS, num_classes) if groups is None else groups
        if not 1 <= count <= num_classes:
            raise InputError(
                f"expected 1 to {num_classes} groups for {num_classes} classes, got "
                f"head_groups={groups}"
            )
        least, more = divmod(num_classes, count)
        return tuple(least + (index < more) for index in range(count))
    if not isinstance(groups, list | tuple):
        raise InputError(f"expected head_groups as an integer or a list of them, got {groups!r}")
    counts = tuple(groups)
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        raise InputError(f"expected at least one class in each group, got head_groups={counts}")
    if sum(counts) != num_classes:
        raise InputError(
            f"expected head_groups that add up to num_classes={num_classes}, got {counts}, which "
            f"add up to {sum(counts)}"
        )
    return counts
