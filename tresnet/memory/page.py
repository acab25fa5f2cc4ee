"""One self-contained HTML page: the timeline to hover over and the table of modules."""

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from tresnet.memory.output import check_path, writing
from tresnet.memory.palette import COLORS
from tresnet.memory.result import Estimate, Prediction
from tresnet.memory.sizes import MIB
from tresnet.memory.timeline import STACK, Point, module_rows, phases, timeline

_DATA = "/*DATA*/"
_TITLE = "<!--TITLE-->"
_SUFFIXES = (".html", ".htm")


def check_page(path: str | Path) -> Path:
    """Whether `write_page` can write there, asked before a prediction is made.

    Raises:
        InputError: the name does not end in .html, or the folder is not there or not writable.
    """
    return check_path(path, _SUFFIXES)


def write_page(prediction: Prediction, path: str | Path) -> Path:
    """Write the page; it needs nothing from anywhere else.

    Raises:
        InputError: as for `check_page`, or the file cannot be written.
    """
    path = check_page(path)
    template = resources.files("tresnet.memory").joinpath("page.html").read_text("utf-8")
    # Inside a script element only "</" and "<!--" could end the data early.
    data = json.dumps(page_data(prediction), separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(f"GPU memory of {prediction.model}")
    with writing(path) as temporary:
        temporary.write_text(template.replace(_TITLE, title).replace(_DATA, data), encoding="utf-8")
    return path


def page_data(prediction: Prediction) -> dict[str, Any]:
    """What the page shows, sizes in MiB. Names of modules and operations are listed once."""
    points = timeline(prediction)
    used = [i for i in range(len(STACK)) if any(p.by_category_bytes[i] for p in points)]
    names = _Names()
    return {
        "model": prediction.model,
        "plan": prediction.plan.describe(),
        "device": prediction.device.name,
        "tiles": {
            "allocated": _tile(prediction.allocated),
            "reserved": _tile(prediction.reserved),
            "device total": _tile(prediction.device_total),
        },
        "notes": list(prediction.notes),
        "categories": [{"name": STACK[i], "color": COLORS[STACK[i]]} for i in used],
        "points": [_point(p, used, names) for p in points],
        "phases": [[s.phase, s.first, s.last] for s in phases(points)],
        "modules": [
            [
                r.name,
                _mib(r.parameter_bytes),
                _mib(r.gradient_bytes),
                _mib(r.activation_bytes),
                _mib(r.activation_gradient_bytes),
                r.operations,
            ]
            for r in module_rows(prediction)
        ],
        "names": names.listed,
    }


class _Names:
    """Numbers for strings that come up again and again."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.listed)
            self.listed.append(name)
        return self._numbers[name]


def _point(point: Point, used: list[int], names: _Names) -> list[Any]:
    operation = point.operation
    shapes = ", ".join("x".join(map(str, shape)) for shape in operation.shapes if shape)
    return [
        names.number(operation.name),
        names.number(operation.module),
        names.number(shapes),
        _mib(point.allocated_bytes),
        _mib(point.reserved_bytes),
        [_mib(point.by_category_bytes[i]) for i in used],
    ]


def _tile(estimate: Estimate) -> list[float]:
    return [_mib(estimate.expected_bytes), *(round(m, 1) for m in estimate.band_mib)]


def _mib(n_bytes: int) -> float:
    return round(n_bytes / MIB, 2)
