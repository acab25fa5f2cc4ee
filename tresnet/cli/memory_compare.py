"""`tresnet memory compare`: predictions beside measurements and beside what other tools say."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.cli.memory_case import MemoryCase
from tresnet.cli.memory_matrix import (
    compare_matrix,
    label,
    matrix_cases,
    mean_error_percent,
    misses,
)
from tresnet.cli.memory_options import PARTLY_FAILED_EXIT_CODE, Measured, cell, load_table
from tresnet.cli.output import format_table, say
from tresnet.errors import InputError, TResNetError

if TYPE_CHECKING:
    from tresnet.memory import Workspaces


@dataclasses.dataclass(frozen=True)
class MemoryCompare(Measured):
    """Compare predictions with measurements, and with torchinfo and torch's MemTracker."""

    no_measuring: bool = False
    """Predict only; for subjects, compare with what the study measured."""

    matrix: bool = False
    """Compare our predictions alone, over all our models (or those named) and peers in training and
    inference, fp32 and bf16, SGD with momentum and AdamW; needs a GPU."""

    workspaces: Path | None = None
    """A table of cuDNN workspaces measured on this GPU, for the predictions."""

    time_limit_s: float = 540
    """With --matrix, seconds after which no further case is begun; what was measured is written."""

    def measured_on(self) -> str | None:
        """The device of the record; None where nothing is measured."""
        return None if self.no_measuring else super().measured_on()

    def run(self, argv: list[str]) -> int:
        """Print one line a model and tool, and write a record."""
        self.check()
        if self.matrix:
            return self._run_matrix(argv)
        rows = [row for case in self.cases() if case.name != "tensor" for row in self._rows(case)]
        say(
            format_table(
                ["case", "by", "peak MiB", "error %", "reserved MiB", "error %", "s", "note"],
                [_line(row) for row in rows],
            )
        )
        self.write("memory_compare", rows, argv)
        return PARTLY_FAILED_EXIT_CODE if any(row["error"] for row in rows) else 0

    def _run_matrix(self, argv: list[str]) -> int:
        """Every case of the matrix, ours alone."""
        if self.no_measuring:
            raise InputError(
                "--matrix compares with measurements: expected it without --no-measuring"
            )
        cases = matrix_cases(self.models, self.device)
        rows = compare_matrix(
            cases, self._until(time.monotonic() + self.time_limit_s), load_table(self.workspaces)
        )
        table = None if self.workspaces is None else self.workspaces.name
        self.write("memory_matrix", rows, argv, {"workspaces": table})
        say(
            format_table(
                ["case", "step", "MiB", "predicted", "error %", "reserved", "predicted", "error %"],
                [_matrix_line(case, row) for case, row in zip(cases, rows, strict=True)],
            )
        )
        mean, found = mean_error_percent(rows), misses(rows)
        say("nothing to compare with" if mean is None else f"mean error {mean:.2f} %")
        for line in found:
            say(line)
        failed = any(row["error"] for row in rows)
        return PARTLY_FAILED_EXIT_CODE if failed or found else 0

    def _until(self, end_s: float) -> Callable[[MemoryCase], dict[str, Any]]:
        def measured(case: MemoryCase) -> dict[str, Any]:
            if time.monotonic() > end_s:
                return {"error": "no time was left"}
            return self.measured(case, label(case))

        return measured

    def _rows(self, case: MemoryCase) -> list[dict[str, Any]]:
        truth = self._truth(case)
        rows = [_row(case.name, truth["by"], truth, truth)]
        for by, tool in _tools(case, load_table(self.workspaces)).items():
            rows.append(_row(case.name, by, _timed(tool), truth))
        return rows

    def _truth(self, case: MemoryCase) -> dict[str, Any]:
        """What a prediction is compared with: measured now, or by the study."""
        from tresnet.memory.subjects import SUBJECTS

        if self.no_measuring:
            subject = SUBJECTS.get(case.name)
            if subject is None:
                return {"by": "nothing measured", "error": None}
            return {"by": "the study, cleaned", "peak_mib": subject.alone_mib, "error": None}
        result = self.measured(case)
        train = result.get("phases", {}).get("train", {})
        return {
            "by": "measured",
            "peak_mib": train.get("max_allocated_mib"),
            "reserved_mib": train.get("reserved_mib"),
            "error": result.get("error"),
        }


def _tools(
    case: MemoryCase, workspaces: "Workspaces | None"
) -> dict[str, Callable[[], dict[str, float]]]:
    """Every tool as a function that gives the peak, and reserved where it knows."""
    from tresnet.memory import predict
    from tresnet.memory.models import find_model
    from tresnet.memory.plan import make_plan
    from tresnet.memory.rivals import RIVALS
    from tresnet.memory.sizes import MIB
    from tresnet.memory.subjects import SUBJECTS

    subject = SUBJECTS.get(case.name)
    source = subject.build if subject else case.name
    step = {**(subject.step if subject else {}), **case.step}

    def ours() -> dict[str, float]:
        predicted = predict(source, model_options=case.model_options, workspaces=workspaces, **step)
        return {"peak_mib": predicted.allocated.mib, "reserved_mib": predicted.reserved.mib}

    def by_formula() -> dict[str, float]:
        predicted = predict(source, model_options=case.model_options, method="formula", **step)
        return {"peak_mib": predicted.allocated.mib}

    def by(n_bytes: Callable[..., int]) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            model = find_model(source, case.model_options)[1]
            return {"peak_mib": n_bytes(model, make_plan(model, **step)) / MIB}

        return run

    rivals = {rival.name: by(rival.n_bytes) for rival in RIVALS}
    return {"predicted": ours, "formula": by_formula, **rivals}


def _matrix_line(case: MemoryCase, row: dict[str, Any]) -> list[str]:
    measured, predicted = row["measured"] or {}, row["predicted"]
    cells = [
        cell(value)
        for what in ("allocated", "reserved")
        for value in (
            measured.get(f"{what}_mib"),
            predicted[f"{what}_mib"],
            row[f"{what}_error_percent"],
        )
    ]
    return [case.name, label(case), *cells]


def _timed(tool: Callable[[], dict[str, float]]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        result: dict[str, Any] = {**tool(), "error": None}
    except TResNetError as error:
        result = {"error": str(error)}
    except Exception as error:
        # Other tools fail in their own ways; the comparison goes on without them.
        result = {"error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": time.perf_counter() - began}


def _row(name: str, by: str, result: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    row = {
        "name": name,
        "by": by,
        "peak_mib": result.get("peak_mib"),
        "reserved_mib": result.get("reserved_mib"),
        "seconds": result.get("seconds"),
        "error": result.get("error"),
    }
    for key in ("peak", "reserved"):
        got, want = row[f"{key}_mib"], truth.get(f"{key}_mib")
        row[f"{key}_error_percent"] = _error_percent(got, want, by == truth["by"])
    return row


def _error_percent(got: float | None, want: float | None, is_truth: bool) -> float | None:
    if is_truth or not got or not want:
        return None
    return 100 * (got / want - 1)


def _line(row: dict[str, Any]) -> list[str]:
    error = " ".join(row["error"].split())[:60] if row["error"] else ""
    return [
        row["name"],
        row["by"],
        cell(row["peak_mib"]),
        cell(row["peak_error_percent"]),
        cell(row["reserved_mib"]),
        cell(row["reserved_error_percent"]),
        cell(row["seconds"]),
        error,
    ]
