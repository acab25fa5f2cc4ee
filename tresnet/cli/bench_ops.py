"""`tresnet bench ops`: single operations against eager PyTorch, Inductor and a copy."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tresnet.measure.bench_ops import OpRow, OpsSettings

_FAILED_EXIT_CODE = 1


@dataclasses.dataclass(frozen=True)
class BenchOps:
    """Time the fused operations of a tresnet_m, forward and backward apart, and their bandwidth."""

    ops: Annotated[Positional[tuple[str, ...]], arg(metavar="[OP ...]")] = ()
    """abn, abn_blur, abn_se, abn_join, blur, stem; by default all."""

    batch_size: int = 128
    """Images in a batch."""

    input_size: int = 224
    """Side of the image in pixels, divisible by 32; the feature maps follow from it."""

    dtype: tuple[Literal["fp32", "bf16", "fp16"], ...] | None = None
    """Of the feature maps, one or several; by default bf16 on a GPU and fp32 on a CPU."""

    contenders: tuple[str, ...] = ()
    """Out of eager, inductor, reference, recompute and triton; by default all that an operation has.
    triton@warps=8,tile=4096 cuts the kernels' work otherwise: tile, blur_tile, warps, programs,
    most_tiles."""

    repeats: int = 20
    """Timed passes of each contender."""

    time_limit_s: float | None = None
    """Begin no operation after this time, and end with what is measured by then."""

    device: str | None = None
    """Such as cuda, cuda:1 or cpu; by default a GPU if there is one."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written; an existing record is never overwritten."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the table and write the record, of an interrupted run too."""
        from tresnet.env import device_or_default
        from tresnet.measure.bench_ops import OpsSettings, bench_ops
        from tresnet.measure.records import check_directory
        from tresnet.measure.results import BenchInterrupt

        device = device_or_default(self.device)
        settings = OpsSettings(
            device,
            self.batch_size,
            self.input_size,
            self.repeats,
            time_limit_s=self.time_limit_s,
            contenders=self.contenders,
        )
        check_directory(self.output_dir)
        dtypes = self.dtype or (("bf16",) if device.startswith("cuda") else ("fp32",))
        try:
            rows = bench_ops(self.ops, dtypes, settings, log=progress)
        except BenchInterrupt as stop:
            self._report(stop.rows, settings, argv)
            raise
        return self._report(rows, settings, argv)

    def _report(self, rows: "Sequence[OpRow]", settings: "OpsSettings", argv: list[str]) -> int:
        from tresnet.measure.bench_ops import METHOD
        from tresnet.measure.records import write_record

        say(_table(rows))
        for note in dict.fromkeys(f"{row.contender}, {row.op}: {row.note}" for row in _noted(rows)):
            progress(note)
        path = write_record(
            self.output_dir,
            "bench_ops",
            device=settings.device,
            settings={**dataclasses.asdict(settings), "method": METHOD},
            rows=[dataclasses.asdict(row) for row in rows],
            warmup_steps=1,
            runs=settings.repeats,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")
        failed = any(row.status not in ("ok", "left_out") for row in rows)
        return _FAILED_EXIT_CODE if failed else 0


def _noted(rows: "Sequence[OpRow]") -> "list[OpRow]":
    return [row for row in rows if row.note is not None]


def _table(rows: "Sequence[OpRow]") -> str:
    header = ["operation", "place", "dtype", "direction", "contender", "p50 us", "GB/s", "x copy"]
    lines = [
        [
            row.op,
            row.place,
            row.dtype,
            row.direction,
            row.contender,
            row.status if row.p50_us is None else f"{row.p50_us:.1f}",
            "-" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
            "-" if row.share_of_copy is None else f"{row.share_of_copy:.3f}",
        ]
        for row in rows
    ]
    return format_table(header, lines)
