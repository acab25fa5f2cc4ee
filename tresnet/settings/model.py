"""Configuration of a model: everything that determines the model's parameters and outputs.

A `ModelConfig` is saved in every checkpoint. Its fields, apart from `variant` and `bottlenecks`,
are also arguments of `tresnet.create`. Most are options of `train.py` and of memory predictions.
The ranges of the fields reject absurd values in damaged or hostile files. Even the largest model
that the ranges allow is built on the meta device in seconds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Le

from tresnet.errors import InputError
from tresnet.settings.fields import Count, FractionBelow1, Settings, check

DEFAULT_GROUPS = 12

Norm = Literal["abn", "batchnorm", "inplace_abn"]
Head = Literal["linear", "bottleneck", "group_attention", "ml_decoder"]
GlobalPool = Literal["avg", "fast", "max", "avgmax", ""]
BlockCount = Annotated[int, Ge(1), Le(1000)]
BlockCounts = tuple[BlockCount, BlockCount, BlockCount, BlockCount]
BlockSize = Annotated[int, Ge(1), Le(64)]
InChans = Annotated[int, Ge(1), Le(4096)]
WidthFactor = Annotated[float, Ge(1 / 64), Le(64)]
HeadSize = Annotated[int, Ge(1), Le(65_536)]


@dataclass(frozen=True, kw_only=True)
class ModelShape(Settings):
    """Options that change a variant's parameters or outputs, or drop parts in training."""

    drop_rate: FractionBelow1 = 0.0
    """Probability of dropout before the classifier; must be 0 for ml_decoder."""
    drop_path_rate: FractionBelow1 = 0.0
    """Stochastic depth: probability to drop the last block, falling linearly to 0 at the first."""
    head: Head | None = None
    """Classifier. None: the classifier of the weights, or linear without weights."""
    head_groups: tuple[Count, ...] | None = None
    """Number of classes in each group of group_attention. None: 12 groups of similar size."""
    head_channels: HeadSize | None = None
    """Hidden channels of bottleneck (None: 512), of ml_decoder (None: 768), or per group of
    group_attention (None: 512)."""
    head_queries: HeadSize | None = None
    """Number of queries of ml_decoder, each for a group of classes (timm's num_of_groups); at most
    one per class. None: 100."""
    width_factor: WidthFactor | None = None
    """Factor of all widths; the stem has 64 times this many channels. None: the variant's value."""
    layers: BlockCounts | None = None
    """Number of blocks in each of the four stages. None: the variant's numbers."""
    block_size: BlockSize | None = None
    """Side of space-to-depth blocks in pixels; 2 suits small images. None: the variant's side."""
    in_chans: InChans | None = None
    """Number of image channels. Others than 3 are read from TIFF and .npy files, with all bits.
    None: that of the weights, or 3."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Configuration that determines a model's parameters and outputs; `checked` validates it.

    Most fields are explained in `ModelShape`, where they are open, and in `Build`.
    """

    norm: Norm = "abn"
    jit: bool = False
    drop_rate: FractionBelow1 = 0.0
    drop_path_rate: FractionBelow1 = 0.0
    head: Head = "linear"
    head_groups: tuple[Count, ...] = ()
    head_channels: HeadSize | None = None
    head_queries: HeadSize | None = None
    width_factor: WidthFactor = 1.0
    layers: BlockCounts
    block_size: BlockSize = 4
    in_chans: InChans = 3
    variant: str
    """Name of the variant, such as tresnet_m: a key of `tresnet.models.zoo.VARIANTS`."""
    bottlenecks: bool = False
    """Whether the first two stages have bottleneck blocks too, as in tresnet_v2_l."""
    num_classes: Annotated[int, Ge(0), Le(10_000_000)] = 1000
    """Number of classes; a model with 0 classes returns pooled features."""
    global_pool: GlobalPool = "avg"
    """Pooling before the linear classifier; fast is timm's other name of avg, and '' means none."""
    stem_slope: float = 1e-2
    """Negative slope of the stem's leaky ReLU."""
    block_slope: float = 1e-3
    """Negative slope of the blocks' leaky ReLUs."""

    def checked(self) -> "ModelConfig":
        """Return a copy with `head_groups` filled in; raise `InputError` for a bad value.

        `layers` and `head_groups` may be lists, and `head_groups` may be the number of groups.
        """
        layers = tuple(self.layers) if isinstance(self.layers, list) else self.layers
        config = dataclasses.replace(self, layers=layers, head_groups=())
        check(config, InputError, str)
        if not config.planes:
            raise InputError(
                f"width_factor: expected at least 1/16 with bottlenecks, got {self.width_factor}"
            )
        config = config._with_groups(self.head_groups)
        config._check_head()
        return config

    def _with_groups(self, groups: Any) -> "ModelConfig":
        """Return a copy with `groups` (sizes, or their number) as `head_groups`, checked.

        Sizes of a number of groups (default: min(12, `num_classes`)) differ by at most one, and
        larger groups come first.
        """
        classes = self.num_classes
        if self.head != "group_attention":
            if groups:
                raise InputError(
                    f"head_groups={groups} needs head='group_attention', got {self.head!r}"
                )
            return self
        if classes == 0:
            return self
        groups = groups or min(DEFAULT_GROUPS, classes)
        if isinstance(groups, int):
            if not 1 <= groups <= classes:
                raise InputError(
                    f"expected 1 to {classes} groups for {classes} classes, got "
                    f"head_groups={groups}"
                )
            least, more = divmod(classes, groups)
            groups = [least + (index < more) for index in range(groups)]
        groups = tuple(groups) if isinstance(groups, list) else groups
        config = dataclasses.replace(self, head_groups=groups)
        check(config, InputError, str)
        if sum(groups) != classes:
            raise InputError(
                f"expected head_groups that add up to num_classes={classes}, got {groups}, which "
                f"add up to {sum(groups)}"
            )
        return config

    def _check_head(self) -> None:
        head, pool, classes = self.head, self.global_pool, self.num_classes
        own = head != "linear" and classes > 0
        rows: list[tuple[object, str]] = [
            (self.head_queries is not None and head != "ml_decoder",
             f"head_queries={self.head_queries} needs head='ml_decoder', got {head!r}"),
            (self.head_channels is not None and head == "linear",
             f"head_channels={self.head_channels} needs head='bottleneck', 'group_attention' or"
             " 'ml_decoder'"),
            (head == "linear" and classes and not pool,
             "a classifier needs a global pool: expected num_classes=0 with no pool"),
            (own and pool != "avg",
             f"head={head!r} has a pool of its own: expected global_pool='avg' (the default), got"
             f" {pool!r}"),
            (own and head == "ml_decoder" and self.drop_rate,
             "head='ml_decoder' has dropout of its own: expected drop_rate=0, got"
             f" {self.drop_rate}"),
        ]  # fmt: skip
        for holds, message in rows:
            if holds:
                raise InputError(message)

    @property
    def planes(self) -> int:
        """Number of the stem's output channels, rounded to a multiple of 8 if `bottlenecks`."""
        planes = int(64 * self.width_factor)
        return (planes + 4) // 8 * 8 if self.bottlenecks else planes

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `tresnet.create` that, with `variant`, build this configuration."""
        return {name: getattr(self, name) for name in ModelOptions.__annotations__}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        values = dataclasses.asdict(self)
        return {**values, "layers": list(self.layers), "head_groups": list(self.head_groups)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return a configuration from values of `to_dict`; bad values raise `InputError`."""
        try:
            config = cls(**values)
        except TypeError as error:
            raise InputError(f"expected the fields of a ModelConfig, got {error}") from error
        return config.checked()


class ModelOptions(TypedDict, total=False):
    """Arguments of `tresnet.create` that set fields of a `ModelConfig`."""

    norm: Norm | None
    jit: bool | None
    drop_rate: float | None
    drop_path_rate: float | None
    head: Head | None
    head_groups: int | Sequence[int] | None
    head_channels: int | None
    head_queries: int | None
    width_factor: float | None
    layers: Sequence[int] | None
    block_size: int | None
    in_chans: int | None
    num_classes: int | None
    global_pool: GlobalPool | None
    stem_slope: float | None
    block_slope: float | None


OPTIONS = frozenset(ModelOptions.__annotations__)
