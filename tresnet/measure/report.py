"""`tresnet bench report`: records read back and drawn as tables in Markdown.

Figures of different devices or PyTorch versions never share a table or a picture: each pair has a
section of its own. Ratios are taken between the rows of one record alone, and each table names its
record.
"""

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tresnet.errors import InputError
from tresnet.files import write_text
from tresnet.measure.cases import BenchCase
from tresnet.measure.records import FORMAT
from tresnet.models.named import split_name

Row = Mapping[str, Any]
STEPS = {"bench_train": "training", "bench_infer": "inference"}
_CASE_FIELDS = tuple(field.name for field in dataclasses.fields(BenchCase))
_NUMBER = (int, float, type(None))
_CASE = {"model": str, "batch_size": int, "status": str, "compile": str, "input": str}
_STEP = {
    **_CASE,
    **dict.fromkeys(("p50_images_per_s", "max_allocated_mib", "rss_peak_mib"), _NUMBER),
}
# What the rows of each kind of record must hold; kinds that are not here are not drawn.
_COLUMNS: dict[str, dict[str, Any]] = {
    "bench_train": {**_STEP, "round_p50_images_per_s": list},
    "bench_infer": {**_STEP, "round_p50_images_per_s": list},
    "bench_max_batch": {**_CASE, "largest_batch": _NUMBER, "memory_limit_mib": _NUMBER},
    "bench_ops": {
        **dict.fromkeys(("op", "place", "dtype", "direction", "contender", "status"), str),
        **dict.fromkeys(("p50_us", "gb_per_s", "share_of_copy"), _NUMBER),
        "shape": list,
    },
}


@dataclasses.dataclass(frozen=True)
class Record:
    """One record: its file's name, and of its content what is drawn.

    `device` is the GPU with its power limit, or the CPU with the threads used: figures of two devices
    are never comparable.
    """

    name: str
    what: str
    command: str
    date_utc: str
    device: str
    on_gpu: bool
    torch: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """Device and version."""
        return f"{self.device}, PyTorch {self.torch}"


def read_records(
    folder: Path, passed_over: Callable[[InputError], object] | None = None
) -> list[Record]:
    """Every record of a folder, oldest first.

    Args:
        folder: where they are.
        passed_over: told of each file that is no sound record, which is then left out; None to
            raise it.

    Raises:
        InputError: no folder, no record in it that can be read, or a damaged one.
    """
    if not folder.is_dir():
        raise InputError(f"expected a folder of records, got {folder}: tresnet bench writes one")
    records, faults = [], []
    for path in sorted(path for path in folder.glob("*.json") if path.is_file()):
        try:
            records.append(read_record(path))
        except InputError as error:
            if passed_over is None:
                raise
            passed_over(error)
            faults.append(str(error))
    if not records:
        found = "; ".join(faults[:3]) or "none"
        raise InputError(f"expected records (*.json) in {folder}, found {found}: measure first")
    return sorted(records, key=lambda one: (one.date_utc, one.name))


def drawable(folder: Path, say: Callable[[str], object]) -> list[Record]:
    """The records of a folder that can be drawn; `say` is told why others are not.

    Raises:
        InputError: there are none.
    """
    records = read_records(folder, lambda error: say(f"warning: not drawn: {error}"))
    for record in records:
        if record.what not in DRAWN:
            say(f"not drawn: {record.name}, a record of {record.what}")
    drawn = [record for record in records if record.what in DRAWN]
    if not drawn:
        raise InputError(f"expected records of {', '.join(DRAWN)} in {folder}, found others only")
    return drawn


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a file, whole or not at all.

    Raises:
        InputError: no such file, or the markers are not in it once each, in this order.
        WriteError: it cannot be written.
    """
    try:
        before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expected a Markdown file, got {path} ({error})") from error
    _, found_end, after = rest.partition(end)
    if not found or not found_end or begin in rest or end in before + after:
        raise InputError(
            f"expected the lines {begin} and {end} once each, in this order, in {path}"
        )
    write_text(path, f"{before}{begin}{text}{end}{after}")


def read_record(path: Path) -> Record:
    """One record.

    Raises:
        InputError: the file is unreadable, damaged, or of another format; its name is in the text.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, not {FORMAT}")
        environment = content["environment"]
        datetime.fromisoformat(environment["date_utc"])
        device, cpu = environment["device"], environment["cpu"]
        on_gpu, limit_w = device["type"] == "cuda", device.get("power_limit_w")
        if on_gpu:
            name = device["name"] + ("" if limit_w is None else f" at {limit_w:.0f} W")
        else:
            threads = f"{cpu['torch_threads']:d} thread{'s' if cpu['torch_threads'] > 1 else ''}"
            name = f"CPU: {cpu['model'] or 'of unknown model'}, {threads}"
        for number, row in enumerate(content["rows"], 1):
            _check_row(content["what"], row, f"row {number}")
        return Record(
            name=path.name,
            what=content["what"],
            command=content["command"],
            date_utc=environment["date_utc"],
            device=name,
            on_gpu=on_gpu,
            torch=environment["packages"]["torch"],
            settings=content["settings"],
            rows=content["rows"],
        )
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    except KeyError as error:
        fault = f"a file without {error}"
    except (TypeError, AttributeError) as error:
        fault = f"values of another type ({error})"
    raise InputError(
        f"{path}: expected a sound record, got {fault[:200]}: remove it, or measure again"
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} for a number")


def _check_row(what: str, row: Row, where: str) -> None:
    for column, kind in _COLUMNS.get(what, {}).items():
        value = row[column]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{where}: {column} = {value!r}")
        for number in value if isinstance(value, list) else (value,):
            if isinstance(value, (int, float, list)) and not 0 < number < 2**63:
                raise ValueError(f"{where}: {column} = {value!r}")


def sections(records: Iterable[Record]) -> list[list[Record]]:
    """Records by device and PyTorch version, GPUs first, each section oldest first."""
    groups: dict[tuple[bool, str], list[Record]] = {}
    for record in records:
        groups.setdefault((not record.on_gpu, record.title), []).append(record)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0])]


def section_markdown(section: Sequence[Record], above: Sequence[str] = ()) -> str:
    """Every table of a section, below pictures or other Markdown of the whole section."""
    parts = [f"### {section[0].title}", *above]
    for record in section:
        tables = [table for draw in DRAWN.get(record.what, ()) if (table := draw(record))]
        if tables:
            source = f"Record: `{record.name}` ({record.date_utc}), `{record.command}`"
            parts += [*tables, source]
    return "\n\n".join(parts)


def contender(row: Row) -> str:
    """Who a row speaks for: a model, the package its norm comes from if that is another's, its input."""
    name = f"{row['model']} with inplace-abn" if row["norm"] == "inplace_abn" else row["model"]
    return f"{name} on uint8" if row["input"] == "uint8" else name


def settings_of(row: Row) -> str:
    """The settings of a case in words, without model and batch size."""
    case = BenchCase(**{name: row[name] for name in _CASE_FIELDS if name in row})
    return ", ".join([*case.label().split(", ")[2:], f"{row['input_size'] or 'own'} px"])


def peak_mib(row: Row) -> float | None:
    """The case's own peak on a GPU; on a CPU that of the whole process."""
    on_gpu = row["max_allocated_mib"] is not None
    return row["max_allocated_mib"] if on_gpu else row["rss_peak_mib"]


def best_rows(rows: Iterable[Row], key: str = "p50_images_per_s") -> list[Row]:
    """The row with the most of `key` for each contender and input size; failed ones count last."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        name = (contender(row), row["input_size"])
        if name not in best or _value(row, key) > _value(best[name], key):
            best[name] = row
    return list(best.values())


def _value(row: Row, key: str) -> float:
    return row[key] if row["status"] == "ok" and row[key] is not None else -1.0


def _ours(rows: Sequence[Row]) -> Row:
    """What the others are compared with: our first model, or the first at all."""
    own = (row for row in rows if split_name(row["model"])[0] == "tresnet")
    return next(own, rows[0])


def speed_table(record: Record) -> str:
    """The fastest case of each contender, and how much faster our first one is."""
    rows = best_rows(record.rows)
    if not rows:
        return ""
    ours = _ours(rows)
    tried = collections.Counter((contender(row), row["input_size"]) for row in record.rows)
    peak = "Peak MiB" if record.on_gpu else "Peak MiB of the process"
    header = [
        "model",
        "its best settings",
        "of",
        "batch",
        "images/s",
        f"{contender(ours)} ÷ it",
        peak,
    ]
    lines = [
        [
            contender(row),
            settings_of(row),
            str(tried[contender(row), row["input_size"]]),
            str(row["batch_size"]),
            _number(row["p50_images_per_s"]) if row["status"] == "ok" else row["status"],
            _number(speed_ratio(record, ours, row), 2),
            _number(peak_mib(row)),
        ]
        for row in rows
    ]
    turns = "in turns" if record.settings.get("interleave") else "one after another"
    what = STEPS[record.what].capitalize()
    title = f"**{what}**, images per second (median step), measured {turns}:"
    return "\n\n".join([title, markdown_table(header, lines), *_failures(record)])


def speed_ratio(record: Record, ours: Row, row: Row) -> float | None:
    """Images/s of `ours` over those of `row`: the median over rounds where they took turns."""
    if min(_value(ours, "p50_images_per_s"), _value(row, "p50_images_per_s")) <= 0:
        return None
    pairs = zip(ours["round_p50_images_per_s"], row["round_p50_images_per_s"], strict=False)
    ratios = [own / theirs for own, theirs in pairs]
    if record.settings.get("interleave") and ratios:
        return statistics.median(ratios)
    return ours["p50_images_per_s"] / row["p50_images_per_s"]


def memory_table(record: Record) -> str:
    """Peak memory by batch size, where a case was measured at several."""
    cases = peaks_by_batch(record)
    if max(map(len, cases.values()), default=0) < 2:
        return ""
    batches = sorted({batch for peaks in cases.values() for batch in peaks})
    name, ours = next(
        ((n, p) for n, p in cases.items() if ":" not in n[0]), next(iter(cases.items()))
    )
    header = ["model", "settings", *(f"batch {batch}" for batch in batches)]
    lines = [
        [*case, *(_beside(peaks.get(batch), ours.get(batch)) for batch in batches)]
        for case, peaks in cases.items()
    ]
    title = f"**Peak MiB of a training step** (in brackets {name[0]} ÷ it):"
    return "\n\n".join([title, markdown_table(header, lines)])


def peaks_by_batch(record: Record) -> dict[tuple[str, str], dict[int, float]]:
    """Peak memory by batch size, for each contender and its settings."""
    cases: dict[tuple[str, str], dict[int, float]] = {}
    for row in record.rows:
        peak = peak_mib(row)
        if row["status"] == "ok" and peak is not None:
            cases.setdefault((contender(row), settings_of(row)), {})[row["batch_size"]] = peak
    return cases


def _beside(value: float | None, ours: float | None) -> str:
    """A value, and ours over it."""
    return _number(value) + ("" if value is None or ours is None else f" ({ours / value:.2f})")


def largest_table(record: Record) -> str:
    """The largest training batch of each case."""
    rows = best_rows(record.rows, "largest_batch")
    if not rows:
        return ""
    ours = _ours(rows)
    most = _value(ours, "largest_batch")
    header = ["model", "settings", "largest batch", "ended by", f"{contender(ours)} ÷ it"]
    lines = []
    for row in rows:
        found = _value(row, "largest_batch")
        lines.append(
            [
                contender(row),
                settings_of(row),
                str(row["largest_batch"]) if found > 0 else row["status"],
                row["limited_by"] or "-",
                _number(most / found if min(most, found) > 0 else None, 2),
            ]
        )
    limit_mib = ours["memory_limit_mib"]
    within = "" if limit_mib is None else f" in {limit_mib / 1024:,.1f} GiB"
    table = markdown_table(header, lines)
    return "\n\n".join([f"**Largest training batch**{within}:", table, *_failures(record)])


def ops_table(record: Record) -> str:
    """Bandwidth of the ideal bytes of each operation, and its share of a copy's."""
    contenders = list(dict.fromkeys(row["contender"] for row in record.rows))
    places: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record.rows:
        shape = " x ".join(map(str, row["shape"]))
        key = (row["op"], row["place"], shape, row["dtype"], row["direction"])
        places.setdefault(key, {})[row["contender"]] = row
    if not places:
        return ""
    header = ["operation", "where", "input", "dtype", "direction", *contenders]
    lines = [
        [*key, *(_bandwidth(rows.get(name)) for name in contenders)] for key, rows in places.items()
    ]
    title = "**Operations**, GB/s of the ideal bytes (share of a copy of the same bytes):"
    notes = dict.fromkeys(
        f"* {row['contender']}, {row['op']}: {row['status'].replace('_', ' ')}: {row['error']}"
        for row in record.rows
        if row["status"] != "ok"
    )
    table = markdown_table(header, lines)
    return "\n\n".join([title, table, *(["\n".join(notes)] if notes else [])])


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


def published_top1(model: str, input_size: int | None) -> Mapping[str, float]:
    """ImageNet-1k top-1, in percent, of published weights of a model at an input size, by their name.

    Ours and timm's TResNets share their weights: both take the table in weights/manifest.json.
    torchvision's are its default weights', as its own metadata states them; empty for other models.
    """
    source, name = split_name(model)
    if source == "torchvision":
        from torchvision.models import get_model_weights

        weights = get_model_weights(name).DEFAULT  # pyright: ignore[reportAttributeAccessIssue]
        top1 = weights.meta.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1")
        if top1 is None or weights.transforms().crop_size != [input_size]:
            return {}
        return {f"{name}.{weights.name}": top1}
    from tresnet.checkpoints.published import entries

    return {
        tag: entry.top1
        for tag, entry in entries().items()
        if (entry.model, entry.num_classes, entry.input_size[-1]) == (name, 1000, input_size)
        and entry.top1 is not None
    }
