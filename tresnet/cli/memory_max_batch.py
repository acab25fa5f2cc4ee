"""`tresnet memory max-batch`: the largest batch that fits, predicted and, with a GPU, tried out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from tresnet.cli.memory_case import MemoryCase, measure_in_new_process
from tresnet.cli.memory_options import (
    PARTLY_FAILED_EXIT_CODE,
    RECORDS,
    GpuOptions,
    StepOptions,
    require_gpu,
)
from tresnet.cli.output import fail, format_table, progress, say

if TYPE_CHECKING:
    from tresnet.memory import MaxBatch

# How much larger the second batch is that `--verify` tries.
_NEXT = 1.1


@dataclasses.dataclass(frozen=True)
class MemoryMaxBatch(StepOptions, GpuOptions):
    """Find the largest batch that fits, without a GPU."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """Ours (tresnet_m), timm:NAME or torchvision:NAME."""

    verify: bool = False
    """Also run that batch and one 10 % larger on the GPU of this machine, and write a record."""

    timeout_s: float = 300
    """Seconds that one of these runs may take."""

    output_dir: Path = RECORDS
    """Where the record is written."""

    def run(self, argv: list[str]) -> int:
        """Print what fits, what may, and what does not; with `--verify`, what did."""
        from tresnet.measure.records import check_directory
        from tresnet.memory import max_batch

        if self.verify:
            require_gpu("cuda")
            check_directory(self.output_dir)
        found = max_batch(
            self.model,
            model_options=self.model_options(self.model),
            **self.step(),
            **self.keywords(),
        )
        say(str(found))
        return self._verify(found, argv) if self.verify else 0

    def _verify(self, found: "MaxBatch", argv: list[str]) -> int:
        from tresnet.measure.records import write_record

        rows = try_out(found, self._measured)
        columns = ["batch_size", "answer", "ran", "holds"]
        say(format_table(columns, [[str(row[c]) for c in columns] for row in rows]))
        settings = {
            "model": self.model,
            **self.step(),
            "capacity_bytes": found.device.capacity_bytes,
            "no_from": found.no_from,
        }
        path = write_record(
            self.output_dir,
            "memory_max_batch",
            device="cuda",
            settings=settings,
            rows=rows,
            warmup_steps=0,
            runs=1,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")
        return 0 if all(row["holds"] for row in rows) else PARTLY_FAILED_EXIT_CODE

    def _measured(self, batch_size: int) -> dict[str, Any]:
        progress(f"running batch {batch_size}")
        step = {**self.step(), "batch_size": batch_size}
        case = MemoryCase(self.model, step, self.model_options(self.model))
        return measure_in_new_process(case, self.timeout_s)


def try_out(found: "MaxBatch", run: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the largest batch and one 10 % larger: did what the prediction says?

    Args:
        found: the prediction.
        run: runs a batch and gives `phases`, or `error` with what went wrong.
    """
    largest = found.batch_size
    rows = []
    for batch_size in (largest, max(round(largest * _NEXT), largest + 1)) if largest else (1,):
        result, answer = run(batch_size), found.answer(batch_size)
        ran, error = "phases" in result, result.get("error")
        full = error is not None and "out of memory" in error.lower()
        holds = {"yes": ran, "no": full, "uncertain": ran or full}[answer.value]
        if error is not None and not full:
            fail(f"batch {batch_size}: {error}")
        train = result.get("phases", {}).get("train", {})
        rows.append(
            {
                "batch_size": batch_size,
                "answer": answer.value,
                "ran": ran,
                "holds": holds,
                "max_allocated_mib": train.get("max_allocated_mib"),
                "reserved_mib": train.get("reserved_mib"),
                "device_used_mib": train.get("device_used_mib"),
                "error": error,
            }
        )
    return rows
