"""What the rewrites of `tresnet.surgery` cost and save: memory, multiply-accumulates, time.

Cases take turns, forwards and backwards through the list, so that a drift of the machine meets them
all alike. Memory is the peak of live tensors in a training step, see `tresnet.measure.live`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tresnet import env
from tresnet.errors import InputError
from tresnet.layers.norm import BatchNormAct
from tresnet.measure.live import training_peak
from tresnet.measure.macs import count_macs, count_parameters, without_computing
from tresnet.measure.percentiles import speed_of
from tresnet.ops.subtracted_conv import MODES
from tresnet.surgery import merge_parallel, pick_fastest, replace_conv


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One case.

    Attributes:
        case: what it is.
        parameters: elements of all parameters.
        peak_mib: most live tensors at once in forward and backward.
        macs: multiply-accumulates of a forward pass, per image of the batch.
        step_p50_ms: median time of forward and backward; None if not timed.
        ratio_to_first: that of the first case over this one's; above 1 is faster.
        note: what else was found.
    """

    case: str
    parameters: int
    peak_mib: float
    macs: int
    step_p50_ms: float | None = None
    ratio_to_first: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class RewriteSettings:
    """How a comparison runs.

    Attributes:
        batch_size: images a step.
        input_size: side of the square input in pixels.
        rounds: timed visits to each case; 0 times nothing.
        steps: timed steps of each visit, after one that is not.
        device: where to time.
    """

    batch_size: int = 16
    input_size: int = 224
    rounds: int = 3
    steps: int = 2
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: one is out of range.
        """
        for name, least in (("batch_size", 1), ("input_size", 1), ("rounds", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise InputError(f"expected {name} of at least {least}, got {getattr(self, name)}")


Build = Callable[[], nn.Module]
_PICKED = "merged, fastest ways"


def compare_convs(
    settings: RewriteSettings, which: Literal["smaller", "spatial", "all"] = "smaller"
) -> list[RewriteRow]:
    """Compare torchvision's ResNet50 with its convolutions swapped for `SubtractedConv`s.

    Args:
        settings: sizes and repeats.
        which: the convolutions to swap; see `tresnet.surgery.replace_conv`.

    Returns:
        Rows: plain, and one for each mode.
    """
    from torchvision.models import resnet50

    def swapped(mode: Any) -> nn.Module:
        model = resnet50()
        replace_conv(model, mode=mode, which=which)
        return model

    builds: dict[str, Build] = {"plain": resnet50}
    builds |= {mode: (lambda mode=mode: swapped(mode)) for mode in MODES}
    shape = (settings.batch_size, 3, settings.input_size, settings.input_size)
    return _compare(builds, shape, settings)


class _Branch(nn.Module):
    """Attention bottleneck, global max pool, linear: one branch of the document's head."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        middle = channels // 2
        self.body = nn.Sequential(
            nn.Conv2d(channels, middle, 1, bias=False),
            BatchNormAct(middle, 0.0),
            nn.Conv2d(middle, middle, 3, padding=1, bias=False),
            BatchNormAct(middle, 0.0),
            nn.Conv2d(middle, channels, 1, bias=False),
            BatchNormAct(channels, None),
        )
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, classes)."""
        return self.fc(torch.flatten(self.pool(torch.relu(self.body(x) + x)), 1))


class _Loop(nn.Module):
    """The branches one after another, their outputs concatenated."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, all classes)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def compare_branches(
    settings: RewriteSettings, groups: int = 12, channels: int = 512
) -> list[RewriteRow]:
    """Compare G attention branches and their linear heads run in a loop and merged.

    Args:
        settings: sizes and repeats; `input_size` is the side of the feature map.
        groups: number of branches; branch g has g + 1 classes.
        channels: channels of each branch.

    Returns:
        Rows: loop, merged, and merged with the fastest way for each convolution.
    """
    if groups < 1 or channels < 2 or channels % 2:
        raise InputError(
            f"expected groups of at least 1 and even channels, got {groups} and {channels}"
        )
    shape = (settings.batch_size, channels, settings.input_size, settings.input_size)

    def branches() -> list[nn.Module]:
        return [_Branch(channels, index + 1) for index in range(groups)]

    def merged() -> nn.Module:
        return merge_parallel(branches())

    builds: dict[str, Build] = {"loop": lambda: _Loop(branches()), "merged": merged}
    if not settings.rounds:
        return _compare(builds, shape, settings)
    return _compare({**builds, _PICKED: merged}, shape, settings)


def _compare(
    builds: dict[str, Build], shape: tuple[int, int, int, int], settings: RewriteSettings
) -> list[RewriteRow]:
    device = env.timed_device(settings.device)
    rows = [_counted(case, build, shape) for case, build in builds.items()]
    if not settings.rounds:
        return rows
    models = {case: build().to(device) for case, build in builds.items()}
    x = torch.rand(shape, device=device)
    ways = pick_fastest(models[_PICKED], x, 2) if _PICKED in models else {}
    times_s = _time(list(models.values()), x, settings)
    medians_s = [speed_of(times, shape[0]).p50_step_time_ms / 1e3 for times in times_s]
    notes = {_PICKED: ", ".join(f"{name}: {way}" for name, way in ways.items())}
    return [
        dataclasses.replace(
            row,
            step_p50_ms=1e3 * median_s,
            ratio_to_first=medians_s[0] / median_s,
            note=notes.get(row.case, ""),
        )
        for row, median_s in zip(rows, medians_s, strict=True)
    ]


def _counted(case: str, build: Build, shape: tuple[int, int, int, int]) -> RewriteRow:
    try:
        with without_computing():
            model = build()
            parameters, macs = count_parameters(model), count_macs(model, shape) // shape[0]
        peak_bytes = training_peak(build, shape)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{case} cannot train on an input of {shape}: {error}") from error
    return RewriteRow(case, parameters, peak_bytes / 2**20, macs)


def _time(models: Sequence[nn.Module], x: Tensor, settings: RewriteSettings) -> list[list[float]]:
    """Seconds of each timed step of each model."""
    times_s: list[list[float]] = [[] for _ in models]
    for number in range(settings.rounds):
        order = range(len(models))
        for index in order if number % 2 == 0 else reversed(order):
            for step in range(settings.steps + 1):
                began_s = time.perf_counter()
                models[index](x).sum().backward()
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                if step:
                    times_s[index].append(time.perf_counter() - began_s)
            models[index].zero_grad()
    return times_s
