"""`tresnet bench inversion`: what abn could save for backward, its output or its input."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tresnet.cli.output import format_table, progress, say
from tresnet.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tresnet.measure.bench_ops import OpRow, OpsSettings
    from tresnet.measure.inversion_error import ErrorRow
    from tresnet.measure.inversion_memory import MemoryRow

_SHOWN_TENSORS = ("grad_x", "grad_weight")


@dataclasses.dataclass(frozen=True)
class BenchInversion:
    """Saving the input of abn against inverting its output: error against fp64, memory, time.

    Ours keeps the convolution's output and rewrites the activation in backward; in-place ABN keeps
    the activation and inverts it.
    """

    parts: tuple[Literal["error", "memory", "time"], ...] = ("error", "memory", "time")
    """What to measure."""

    dtype: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16", "fp16")
    """Of the feature maps, for error and time; memory is counted in fp32."""

    model: str = "tresnet_m"
    """Whose training step's memory is counted; one of ours."""

    input_size: int = 224
    """Side of the image in pixels, divisible by 32; the feature maps follow from it."""

    memory_batch_size: int = 2
    """Images of the training step whose memory is counted."""

    batch_size: int = 128
    """Images of the feature maps that are timed."""

    stages: tuple[int, ...] = (1, 3)
    """Where in a tresnet_m the timed feature maps are, 1 to 4."""

    layout: tuple[Literal["channels_last", "contiguous"], ...] = ("channels_last",)
    """Memory format of the timed feature maps."""

    repeats: int = 20
    """Timed passes of each contender."""

    time_limit_s: float | None = None
    """Begin no timing after this time of the command, and end with what is measured by then."""

    device: str | None = None
    """Such as cuda, cuda:1 or cpu; by default a GPU if there is one."""

    output_dir: Path = Path("benchmarks/records")
    """Where the record is written; an existing record is never overwritten."""

    def run(self, argv: list[str]) -> int:
        """Measure, print the tables and write the record."""
        from tresnet import env
        from tresnet.measure.bench_ops import OpsSettings
        from tresnet.measure.inversion_time import check_stages
        from tresnet.measure.records import check_directory, write_record
        from tresnet.models.zoo import find_variant

        name = env.device_or_default(self.device)
        device = env.timed_device(name)
        settings = OpsSettings(
            name, self.batch_size, self.input_size, self.repeats, time_limit_s=self.time_limit_s
        )
        find_variant(self.model)
        check_stages(self.stages)
        if self.memory_batch_size < 1:
            raise InputError(
                f"expected memory_batch_size of at least 1, got {self.memory_batch_size}"
            )
        check_directory(self.output_dir)
        rows = self._measured(device, settings)
        path = write_record(
            self.output_dir,
            "bench_inversion",
            device=device,
            settings={**self._plain_settings(), "device": name, "method": _methods()},
            rows=rows,
            warmup_steps=1,
            runs=self.repeats,
            argv=["tresnet", *argv],
        )
        progress(f"record: {path}")
        failed = any(row.get("status", "ok") not in ("ok", "left_out") for row in rows)
        return 1 if failed else 0

    def _measured(self, device: "torch.device", settings: "OpsSettings") -> list[dict[str, Any]]:
        """The rows of all parts, each printed as it is done."""
        from tresnet.measure.inversion_error import measure_errors
        from tresnet.measure.inversion_memory import measure_memory
        from tresnet.measure.inversion_time import measure_times

        rows: list[dict[str, Any]] = []
        began_s = time.perf_counter()
        if "error" in self.parts:
            errors = measure_errors(self.dtype, device)
            say(_error_tables(errors))
            rows += [{"part": "error", **dataclasses.asdict(row)} for row in errors]
        if "memory" in self.parts:
            kept = measure_memory(self.model, self.memory_batch_size, self.input_size, device)
            say(_memory_table(kept))
            rows += [{"part": "memory", **dataclasses.asdict(row)} for row in kept]
        if "time" in self.parts:
            if self.time_limit_s is not None:
                left_s = self.time_limit_s - (time.perf_counter() - began_s)
                settings = dataclasses.replace(settings, time_limit_s=max(left_s, 1e-9))
            times = measure_times(self.dtype, self.stages, self.layout, settings, device, progress)
            say(_time_table(times))
            rows += [
                {"part": "time", "layout": layout, **dataclasses.asdict(row)}
                for layout, row in times
            ]
        return rows

    def _plain_settings(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "output_dir": self.output_dir.name}


def _methods() -> dict[str, Any]:
    from tresnet.measure import bench_ops, inversion_error, inversion_memory, inversion_time

    return {
        "error": {**inversion_error.METHOD, "shape": inversion_error.SHAPE},
        "memory": inversion_memory.METHOD,
        "time": {**bench_ops.METHOD, "layout": "see each row", **inversion_time.METHOD},
    }


def _error_tables(rows: "Sequence[ErrorRow]") -> str:
    """The largest error over the betas: ours, and the better of the two gammas of the other."""
    slopes = list(dict.fromkeys(row.slope for row in rows))
    header = ["dtype", "gamma"]
    for slope in slopes:
        header += ["linear" if slope is None else f"slope {slope:g}", "inverting"]
    tables = []
    for tensor in _SHOWN_TENSORS:
        worst: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in rows:
            case = worst.setdefault((row.dtype, row.gamma, row.slope), {})
            error = row.errors[tensor].worst()
            case[row.variant] = max(error, case.get(row.variant, 0.0))
        lines = []
        for dtype, gamma in dict.fromkeys((row.dtype, row.gamma) for row in rows):
            line = [dtype, f"{gamma:g}"]
            for slope in slopes:
                found = worst[dtype, gamma, slope]
                ours = found.get("triton", found["recompute"])
                theirs = min(found["inverting"], found["inverting_plain"])
                line += [f"{ours:.1e}", f"{theirs:.1e}"]
            lines.append(line)
        tables.append(f"largest relative error of {tensor}\n{format_table(header, lines)}")
    return "\n\n".join(tables) + "\n"


def _memory_table(rows: "Sequence[MemoryRow]") -> str:
    header = ["network", "norm", "kept maps", "kept MiB/image", "peak MiB/image", "status"]
    lines = [
        [
            row.network,
            row.case,
            _cell(row.kept_maps, 2),
            _cell(row.kept_mib_per_image, 2),
            _cell(row.peak_mib_per_image, 2),
            row.status,
        ]
        for row in rows
    ]
    return format_table(header, lines) + "\n"


def _time_table(rows: "Sequence[tuple[str, OpRow]]") -> str:
    header = ["place", "layout", "dtype", "contender", "forward us", "backward us", "both us"]
    found: dict[tuple[str, ...], dict[str, OpRow]] = {}
    for layout, row in rows:
        key = (row.place, layout, row.dtype, row.contender)
        found.setdefault(key, {})[row.direction] = row
    lines = []
    for key, pair in found.items():
        forward, backward = pair["forward"], pair["backward"]
        if forward.p50_us is None or backward.p50_us is None:
            lines.append([*key, forward.status, "-", "-"])
            continue
        both = (forward.p50_us, backward.p50_us, forward.p50_us + backward.p50_us)
        lines.append([*key, *(f"{one:.1f}" for one in both)])
    return format_table(header, lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
