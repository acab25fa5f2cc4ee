"""What the commands print: results on stdout, progress and errors on stderr."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence


def prepare() -> None:
    """Make the streams take any text, and help plain where the user asks for that."""
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # read when tyro is imported
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # closed
                # a name that is no UTF-8, or a word that the terminal's encoding lacks
                stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a line of the result."""
    sys.stdout.write(text + "\n")


def progress(text: str) -> None:
    """Print a line that is not part of the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(error: BaseException | str) -> None:
    """Print `error: ...` as one line."""
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, as wide as their widest cell; numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    to_right = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]
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
