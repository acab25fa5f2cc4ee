"""`tresnet memory compare`: predictions beside measurements and beside what other tools say."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tresnet.cli.memory_case import MemoryCase
from tresnet.cli.memory_options import PARTLY_FAILED_EXIT_CODE, Measured, cell
from tresnet.cli.output import format_table, say
from tresnet.errors import TResNetError


@dataclasses.dataclass(frozen=True)
class MemoryCompare(Measured):
    """Compare predictions with measurements, and with torchinfo and torch's MemTracker."""

    no_measuring: bool = False
    """Predict only; for subjects, compare with what the study measured."""

    def measured_on(self) -> str | None:
        """The device of the record; None where nothing is measured."""
        return None if self.no_measuring else super().measured_on()

    def run(self, argv: list[str]) -> int:
        """Print one line a model and tool, and write a record."""
        self.measured_on()
        rows = [row for case in self.cases() if case.name != "tensor" for row in self._rows(case)]
        say(
            format_table(
                ["case", "by", "peak MiB", "error %", "reserved MiB", "error %", "s", "note"],
                [_line(row) for row in rows],
            )
        )
        self.write("memory_compare", rows, argv)
        return PARTLY_FAILED_EXIT_CODE if any(row["error"] for row in rows) else 0

    def _rows(self, case: MemoryCase) -> list[dict[str, Any]]:
        truth = self._truth(case)
        rows = [_row(case.name, truth["by"], truth, truth)]
        for by, tool in _tools(case).items():
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


def _tools(case: MemoryCase) -> dict[str, Callable[[], dict[str, float]]]:
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
        predicted = predict(source, model_options=case.model_options, **step)
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


def _timed(tool: Callable[[], dict[str, float]]) -> dict[str, Any]:
    import time

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
