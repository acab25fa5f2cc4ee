"""Tables drawn from records, in Markdown.

Figures of different devices or PyTorch versions never share a table: each pair has a section of its
own. Ratios are taken between the rows of one record alone, and each table names its record.
"""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tresnet.measure.cases import BenchCase
from tresnet.measure.read_records import Record

Row = Mapping[str, Any]
_CASE_FIELDS = tuple(field.name for field in dataclasses.fields(BenchCase))
_TITLES = {"bench_train": "Training", "bench_infer": "Inference"}


@dataclasses.dataclass(frozen=True)
class Section:
    """The records of one device and one PyTorch version, oldest first."""

    device: str
    torch: str
    on_gpu: bool
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        """Device and version."""
        return f"{self.device}, PyTorch {self.torch}"


def sections(records: Iterable[Record]) -> list[Section]:
    """Records by device and PyTorch version, GPUs first."""
    groups: dict[tuple[bool, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((not record.on_gpu, record.device, record.torch), []).append(record)
    return [
        Section(device, torch, not on_cpu, tuple(group))
        for (on_cpu, device, torch), group in sorted(groups.items())
    ]


def section_markdown(section: Section, above: Sequence[str] = ()) -> str:
    """Every table of a section.

    Args:
        section: what to draw.
        above: pictures and tables of the whole section, as Markdown, to stand above the others.
    """
    parts = [f"### {section.title}", *above]
    for record in section.records:
        tables = [table for draw in DRAWN.get(record.what, ()) if (table := draw(record))]
        if tables:
            source = f"Record: `{record.name}` ({record.date_utc}), `{record.command}`"
            parts += [*tables, source]
    return "\n\n".join(parts)


def contender(row: Row) -> str:
    """Who a row speaks for: a model, the package its norm comes from if that is another's, its input.

    A step that begins with bytes does more than one that begins with floats.
    """
    name = f"{row['model']} with inplace-abn" if row["norm"] == "inplace_abn" else row["model"]
    return f"{name} on uint8" if row.get("input") == "uint8" else name


def settings_of(row: Row) -> str:
    """The settings of a case in words, without model and batch size."""
    case = BenchCase(**{name: row[name] for name in _CASE_FIELDS if name in row})
    return ", ".join([*case.label().split(", ")[2:], f"{row['input_size'] or 'own'} px"])


def peak_mib(row: Row) -> float | None:
    """The case's own peak on a GPU; on a CPU that of the whole process."""
    on_gpu = row["max_allocated_mib"] is not None
    return row["max_allocated_mib"] if on_gpu else row["rss_peak_mib"]


def best_rows(rows: Iterable[Row], key: str = "p50_images_per_s") -> dict[tuple[str, int], Row]:
    """For each contender and input size, in the order of the rows, the row with the most of `key`.

    Rows that failed count only where nothing else is left.
    """
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        name = (contender(row), row["input_size"])
        if name not in best or _value(row, key) > _value(best[name], key):
            best[name] = row
    return best


def _value(row: Row, key: str) -> float:
    return row[key] if row["status"] == "ok" and row[key] is not None else -1.0


def speed_table(record: Record) -> str:
    """The fastest case of each contender, and how much faster the first contender is."""
    rows = list(best_rows(record.rows).values())
    if not rows:
        return ""
    first = rows[0]
    measured = collections.Counter((contender(row), row["input_size"]) for row in record.rows)
    header = [
        "model",
        "its best settings",
        "of",
        "batch",
        "images/s",
        f"{contender(first)} ÷ it",
        _peak_title(record),
    ]
    lines = [
        [
            contender(row),
            settings_of(row),
            str(measured[contender(row), row["input_size"]]),
            str(row["batch_size"]),
            _number(row["p50_images_per_s"]) if row["status"] == "ok" else row["status"],
            _number(speed_ratio(record, first, row), 2),
            _number(peak_mib(row)),
        ]
        for row in rows
    ]
    turns = "in turns" if record.settings.get("interleave") else "one after another"
    title = f"**{_TITLES[record.what]}**, images per second (median step), measured {turns}:"
    return "\n\n".join([title, markdown_table(header, lines), *_failures(record)])


def speed_ratio(record: Record, first: Row, row: Row) -> float | None:
    """Images/s of `first` over those of `row`: the median over rounds where they took turns."""
    if _value(first, "p50_images_per_s") <= 0 or _value(row, "p50_images_per_s") <= 0:
        return None
    ours, theirs = first["round_p50_images_per_s"], row["round_p50_images_per_s"]
    if record.settings.get("interleave") and ours and len(ours) == len(theirs):
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return first["p50_images_per_s"] / row["p50_images_per_s"]


def memory_table(record: Record) -> str:
    """Peak memory by batch size, where a case was measured at several."""
    cases: dict[tuple[str, str], dict[int, float]] = {}
    for row in record.rows:
        peak = peak_mib(row)
        if row["status"] == "ok" and peak is not None:
            cases.setdefault((contender(row), settings_of(row)), {})[row["batch_size"]] = peak
    batches = sorted({batch for peaks in cases.values() for batch in peaks})
    if max(map(len, cases.values()), default=0) < 2:
        return ""
    (first_name, _), first = next(iter(cases.items()))
    header = ["model", "settings", *(f"batch {batch}" for batch in batches)]
    lines = [
        [name, settings, *(_beside(peaks.get(batch), first.get(batch)) for batch in batches)]
        for (name, settings), peaks in cases.items()
    ]
    title = f"**{_peak_title(record)} of a training step** (in brackets {first_name} ÷ it):"
    return "\n\n".join([title, markdown_table(header, lines)])


def _beside(value: float | None, first: float | None) -> str:
    """A value, and the first case's over it."""
    ratio = "" if value is None or first is None else f" ({first / value:.2f})"
    return _number(value) + ratio


def largest_table(record: Record) -> str:
    """The largest training batch of each case."""
    rows = list(best_rows(record.rows, "largest_batch").values())
    if not rows:
        return ""
    first = rows[0]
    header = ["model", "settings", "largest batch", "ended by", f"{contender(first)} ÷ it"]
    lines = []
    for row in rows:
        found = _value(row, "largest_batch")
        ratio = _value(first, "largest_batch") / found if found > 0 else None
        lines.append(
            [
                contender(row),
                settings_of(row),
                str(row["largest_batch"]) if found > 0 else row["status"],
                row["limited_by"] or "-",
                _number(ratio, 2) if _value(first, "largest_batch") > 0 else "-",
            ]
        )
    limit_mib = first["memory_limit_mib"]
    within = "" if limit_mib is None else f" in {limit_mib / 1024:,.1f} GiB"
    return "\n\n".join([f"**Largest training batch**{within}:", markdown_table(header, lines)])


def ops_table(record: Record) -> str:
    """Bandwidth of the ideal bytes of each operation, and its share of a copy's."""
    if not record.rows:
        return ""
    contenders = list(dict.fromkeys(row["contender"] for row in record.rows))
    places: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record.rows:
        shape = " x ".join(map(str, row["shape"]))
        key = (row["op"], row["place"], shape, row["dtype"], row["direction"])
        places.setdefault(key, {})[row["contender"]] = row
    header = ["operation", "where", "input", "dtype", "direction", *contenders]
    lines = [
        [*key, *(_bandwidth(rows.get(name)) for name in contenders)] for key, rows in places.items()
    ]
    title = "**Operations**, GB/s of the ideal bytes (share of a copy of the same bytes):"
    notes = dict.fromkeys(
        f"* {row['contender']}, {row['op']}: {row['status'].replace('_', ' ')}: {row['note']}"
        for row in record.rows
        if row["status"] != "ok"
    )
    return "\n\n".join(
        [title, markdown_table(header, lines), *(["\n".join(notes)] if notes else [])]
    )


def _bandwidth(row: Row | None) -> str:
    if row is None or row["gb_per_s"] is None:
        return "-" if row is None else row["status"].replace("_", " ")
    share = row["share_of_copy"]
    return _number(row["gb_per_s"]) + ("" if share is None else f" ({share:.0%})")


def _failures(record: Record) -> list[str]:
    lines = [
        f"* {contender(row)}, batch {row['batch_size']}, {settings_of(row)}: "
        f"{row['status'].replace('_', ' ')}: {row['error']}"
        for row in record.rows
        if row["status"] != "ok"
    ]
    return ["\n".join(lines)] if lines else []


def _peak_title(record: Record) -> str:
    return "Peak MiB" if record.on_gpu else "Peak MiB of the process"


def _number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value:,.{max(digits, 1) if abs(value) < 100 else digits}f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |"
        for line in lines
    )


DRAWN: dict[str, tuple[Callable[[Record], str], ...]] = {
    "bench_train": (speed_table, memory_table),
    "bench_infer": (speed_table,),
    "bench_max_batch": (largest_table,),
    "bench_ops": (ops_table,),
}
