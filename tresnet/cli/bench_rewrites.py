"""`tresnet bench branches` and `tresnet bench convs`: what the exact rewrites save."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from tresnet.measure.rewrites import RewriteRow, RewriteSettings


@dataclasses.dataclass(frozen=True)
class _Options:
    batch_size: int = 16
    """Images a step."""

    rounds: int = 3
    """Timed visits to each case; every round visits every case. 0 counts memory and work alone."""

    steps: int = 2
    """Timed steps of each visit."""

    device: str = "cpu"
    """Where to time, such as cpu or cuda. Memory is counted from the tensors, without computing."""

    output_dir: Path = Path("benchmarks/records")
    """Directory of the record; existing records are never overwritten."""

    def settings(self, input_size: int) -> "RewriteSettings":
        """The settings, checked like the directory of the record."""
        from tresnet.measure.records import check_directory
        from tresnet.measure.rewrites import RewriteSettings

        settings = RewriteSettings(
            self.batch_size, input_size, self.rounds, self.steps, self.device
        )
        check_directory(self.output_dir)
        return settings


@dataclasses.dataclass(frozen=True)
class BenchBranches(_Options):
    """Attention branches with linear heads: in a loop, and merged into grouped layers."""

    groups: int = 12
    """Branches; branch g has g + 1 classes."""

    channels: int = 512
    """Channels of each branch."""

    input_size: int = 14
    """Side of the feature map."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.rewrites import compare_branches

        settings = self.settings(self.input_size)
        rows = compare_branches(settings, self.groups, self.channels)
        return _report("bench_branches", rows, settings, self.output_dir, argv)


@dataclasses.dataclass(frozen=True)
class BenchConvs(_Options):
    """ResNet50: plain, and with subtracted convolutions in each of their three modes."""

    input_size: int = 224
    """Side of the image in pixels."""

    which: Literal["smaller", "spatial", "all"] = "smaller"
    """Convolutions to swap: where that saves parameters, larger than 1x1, or all possible."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record."""
        from tresnet.measure.rewrites import compare_convs

        settings = self.settings(self.input_size)
        rows = compare_convs(settings, self.which)
        return _report("bench_convs", rows, settings, self.output_dir, argv)


def _report(
    what: str,
    rows: "Sequence[RewriteRow]",
    settings: "RewriteSettings",
    directory: Path,
    argv: Sequence[str],
) -> int:
    from tresnet.measure.records import write_record

    header = ["case", "parameters", "peak MiB", "GMACs/image", "step ms", "x faster"]
    cells = [
        [
            row.case,
            str(row.parameters),
            f"{row.peak_mib:.1f}",
            f"{row.macs / 1e9:.3f}",
            "-" if row.step_p50_ms is None else f"{row.step_p50_ms:.1f}",
            "-" if row.ratio_to_first is None else f"{row.ratio_to_first:.3f}",
        ]
        for row in rows
    ]
    say(format_table(header, cells))
    for row in rows:
        if row.note:
            say(f"{row.case}: {row.note}")
    path = write_record(
        directory,
        what,
        device=settings.device,
        settings=dataclasses.asdict(settings),
        rows=[dataclasses.asdict(row) for row in rows],
        warmup_steps=1,
        runs=settings.rounds * settings.steps,
        argv=["tresnet", *argv],
    )
    progress(f"record: {path}")
    return 0
