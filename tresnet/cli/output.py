"""Print the results of commands on stdout, and progress and errors on stderr."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tresnet.measure.runner import Outcome

PARTLY_FAILED_EXIT_CODE = 1
BAD_IMAGE_EXIT_CODE = 2


def say(text: str, end: str = "\n") -> None:
    """Print a line of a command's result on stdout."""
    sys.stdout.write(text + end)


def progress(text: str) -> None:
    """Print a line about a command's progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def one_line(text: str) -> str:
    """Return text with escapes in place of line breaks and other control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with columns of numbers right-aligned and others left-aligned."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    to_right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(",", "").replace(".", "", 1).isdigit()


def report(outcome: "Outcome", columns: Sequence[tuple[str, str, str]]) -> int:
    """Print a table of cases, and call `finish`; each column is (title, key in a row, format)."""
    header = ["case", *(title for title, _, _ in columns), "status"]
    lines = [
        [label, *(_cell(row, key, spec) for _, key, spec in columns), row["status"]]
        for label, row in zip(outcome.labels, outcome.rows, strict=True)
    ]
    say(format_table(header, lines))
    return finish(outcome)


def _cell(row: dict[str, Any], key: str, spec: str) -> str:
    value = row.get(key)
    if value is None and key == "max_allocated_mib":
        value = row.get("rss_peak_mib")  # on a CPU, only the process's peak memory is measured
    return "-" if value is None else format(value, spec)


def finish(outcome: "Outcome") -> int:
    """Print each case's errors and notes, then the record's path; return the exit code."""
    notes: dict[str, str] = {}
    for label, row in zip(outcome.labels, outcome.rows, strict=True):
        for note in filter(None, (row["error"], row.get("note"))):
            notes.setdefault(note, label)
    for note, label in notes.items():
        progress(f"{label}: {note}")
    progress(f"record: {outcome.path}")
    if outcome.interrupted:
        raise KeyboardInterrupt
    return 0 if outcome.complete else PARTLY_FAILED_EXIT_CODE
