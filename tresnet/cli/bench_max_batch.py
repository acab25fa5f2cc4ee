"""`tresnet bench max-batch`: the largest training batch that runs."""

import dataclasses
from typing import TYPE_CHECKING

from tresnet.cli.bench_options import ModelOptions
from tresnet.cli.output import format_table, progress, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tresnet.measure.largest_batch import LargestRow

_FAILED_EXIT_CODE = 1


@dataclasses.dataclass(frozen=True)
class BenchMaxBatch(ModelOptions):
    """Find the largest training batch that fits, by real steps (SGD with momentum)."""

    first: int = 64
    """The batch tried first."""

    granularity: int = 16
    """The answer is a multiple of this."""

    at_most: int | None = None
    """Try no larger batch; needed on a CPU."""

    memory_gib: float | None = None
    """Give PyTorch's allocator no more than this, so that a larger GPU stands for a smaller one; the
    CUDA context, about half a GiB, comes on top."""

    time_limit_s: float | None = None
    """Try no batch after this time, for each model; its answer is then the largest that ran."""

    def run(self, argv: list[str]) -> int:
        """Search, print the table and write the record."""
        from tresnet.measure.largest_batch import LargestSettings, largest_batches
        from tresnet.measure.records import check_directory, write_record

        settings = LargestSettings(
            self.resolved_device(),
            self.first,
            self.granularity,
            self.at_most,
            self.memory_gib,
            time_limit_s=self.time_limit_s,
        )
        check_directory(self.output_dir)
        rows = largest_batches(self.cases((self.first,)), settings, log=progress)
        say(_table(rows))
        path = write_record(
            self.output_dir,
            "bench_max_batch",
            device=settings.device,
            settings=dataclasses.asdict(settings),
            rows=[row.to_dict() for row in rows],
            warmup_steps=0,
            runs=1,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")
        return 0 if all(row.status == "ok" for row in rows) else _FAILED_EXIT_CODE


def _table(rows: "Sequence[LargestRow]") -> str:
    header = ["case", "largest batch", "ended by", "peak MiB", "status"]
    lines = [
        [
            dataclasses.replace(row.case, batch_size=row.largest_batch or 0).label(),
            "-" if row.largest_batch is None else str(row.largest_batch),
            row.limited_by or "-",
            "-" if row.max_allocated_mib is None else f"{row.max_allocated_mib:.1f}",
            row.status,
        ]
        for row in rows
    ]
    return format_table(header, lines)
