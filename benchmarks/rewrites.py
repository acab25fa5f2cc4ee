#!/usr/bin/env python3
"""What two exact rewrites cost and save: the tables of docs/three-linear-convolutions.md.

    python benchmarks/rewrites.py convs       ResNet50, plain and with subtracted convolutions
    python benchmarks/rewrites.py branches    attention with linear heads, in a loop and merged

counts parameters, multiply-accumulates and the peak of live tensors in a training step, without
computing it; `--rounds 3` times forward and backward in turns too, and `--output-dir` records it.
"""

import dataclasses
import itertools
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tresnet.cli.output import format_table, progress, say
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.norm import BatchNormAct
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.measure.macs import count_macs, count_parameters, without_computing
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, Outcome, Rounds, run
from tresnet.measure.settings import RunSettings
from tresnet.ops.subtracted_conv import MODES
from tresnet.surgery import merge_parallel

Build = Callable[[], nn.Module]
GROUPS, CHANNELS = 12, 512  # of the branches; branch g has g + 1 classes


@dataclasses.dataclass(frozen=True)
class Options:
    """How a comparison runs."""

    what: tyro.conf.Positional[Literal["convs", "branches"]]
    """ResNet50's convolutions, or the branches."""
    batch_size: int = 16
    """Images a step."""
    rounds: int = 0
    """Timed visits to each case; 0 times nothing."""
    steps: int = 2
    """Timed steps of each visit, after one that is not."""
    device: str = "cpu"
    """Where to time."""
    output_dir: Path | None = None
    """Where to write a record."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W) of the input."""
        inner = (3, 224, 224) if self.what == "convs" else (CHANNELS, 14, 14)
        return (self.batch_size, *inner)


def builds(what: str) -> dict[str, Build]:
    """What makes each model that is compared."""
    if what == "branches":
        return {"loop": lambda: _Loop(_branches()), "merged": lambda: _Merged(_branches())}
    from torchvision.models import resnet50

    def swapped(mode: Any) -> nn.Module:
        model = resnet50()
        SubtractedConv.replace_in(model, mode)
        return model

    return {"plain": resnet50, **{mode: (lambda mode=mode: swapped(mode)) for mode in MODES}}


def _branches() -> "list[_Branch]":
    return [_Branch(CHANNELS, index + 1) for index in range(GROUPS)]


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


class _Attention(nn.Module):
    """The convolutions of a branch and their input, added."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same."""
        return torch.relu(self.body(x) + x)


class _Merged(nn.Module):
    """The branches' convolutions run at once, and their linear layers."""

    def __init__(self, branches: Sequence[_Branch]) -> None:
        super().__init__()
        self.attention = merge_parallel([_Attention(branch.body) for branch in branches])
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.fc = GroupedLinear.from_linears([branch.fc for branch in branches])

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, all classes)."""
        return self.fc(torch.flatten(self.pool(self.attention(x)), 1))


class _Loop(nn.Module):
    """The branches one after another, their outputs concatenated."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, all classes)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Rewrite(Contender):
    """One model: counted, and timed if there are rounds."""

    def __init__(self, name: str, build: Build, options: Options) -> None:
        self.label, self._build, self._options = name, build, options
        self.columns = {
            "case": name,
            "parameters": None,
            "peak_mib": None,
            "macs": None,
        }
        self._model: nn.Module | None = None

    def set_up(self) -> None:
        """Count, and build what is timed."""
        shape = self._options.shape
        with without_computing():
            model = self._build()
            self.columns["parameters"] = count_parameters(model)
            self.columns["macs"] = count_macs(model, shape) // shape[0]
        self.columns["peak_mib"] = training_peak(self._build, shape) / 2**20
        if self._options.rounds:
            self._model = self._build().to(self._options.device)
            self._x = torch.rand(shape, device=self._options.device)

    def visit(self) -> Sequence[float]:
        """Seconds of each step."""
        assert self._model is not None, "set up before"
        marks = []
        for _ in range(self._options.steps + 1):
            self._model(self._x).sum().backward()
            if self._x.is_cuda:
                torch.cuda.synchronize(self._x.device)
            marks.append(time.perf_counter())
        self._model.zero_grad()
        return [end - begin for begin, end in itertools.pairwise(marks)]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Median time."""
        times_s = [time_s for visit in rounds for time_s in visit]
        return {"step_p50_ms": 1e3 * statistics.median(times_s) if times_s else None}

    def close(self) -> None:
        """Free the model."""
        self._model = None


class LivePeak(TorchDispatchMode):
    """Counts the storages that operators make while it is active.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most that was alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._dead, key, size)

    def _dead(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def training_peak(build: Any, input_shape: tuple[int, ...]) -> int:
    """Return the peak bytes of one forward and backward pass, without computing it.

    Parameters, buffers, the input, activations and gradients count; optimizer state does not.

    Args:
        build: makes the model, on the default device.
        input_shape: (N, C, H, W), float32.
    """
    with without_computing():
        model: nn.Module = build()
        model.train()
        x = torch.empty(input_shape)
        peak = LivePeak()
        with peak:
            for tensor in (*model.parameters(), *model.buffers(), x):
                peak.add(tensor)
            model(x).sum().backward()
        return peak.peak_bytes


def compare(options: Options) -> Outcome:
    """Count, and time, all cases."""
    compared = builds(options.what)
    record = None
    if options.output_dir is not None:
        about = {**dataclasses.asdict(options), "output_dir": None}
        record = RecordFile(
            options.output_dir, f"bench_{options.what}", device=options.device, settings=about
        )
    group = [Rewrite(name, build, options) for name, build in compared.items()]
    return run([group], RunSettings(options.rounds), log=progress, record=record)


def main(options: Options) -> int:
    """Compare and print the table."""
    outcome = compare(options)
    columns = ["case", "parameters", "peak_mib", "macs", "step_p50_ms", "ratio_to_first", "status"]
    cells = [[_cell(row[column]) for column in columns] for row in outcome.rows]
    header = ["case", "parameters", "peak MiB", "MACs/image", "step ms", "x faster", "status"]
    say(format_table(header, cells))
    for error in filter(None, (row["error"] for row in outcome.rows)):
        progress(error)
    return 0 if outcome.complete else 1


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
