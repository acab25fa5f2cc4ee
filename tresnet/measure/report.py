"""`tresnet bench report`: records read back, drawn as tables in Markdown and as a picture.

Figures of different devices or PyTorch versions never share a table or a picture: each pair has a
section of its own. Ratios are taken between the rows of one record alone, and each table names its
record.
"""

import collections
import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.errors import InputError, needed
from tresnet.files import write_text
from tresnet.measure.cases import BenchCase
from tresnet.measure.records import FORMAT
from tresnet.models.named import split_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
STEPS = {"bench_train": "training", "bench_infer": "inference"}
_CASE_FIELDS = BenchCase.__dataclass_fields__.keys()
# Hues of Okabe and Ito's set, which people with colour blindness can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclasses.dataclass(frozen=True)
class Record:
    """One record: its file's name, and of its content what is drawn.

    `title` is the GPU with its power limit, or the CPU with the threads used, and PyTorch's
    version: figures of two are never comparable.
    """

    name: str
    what: str
    command: str
    date_utc: str
    title: str
    on_gpu: bool
    settings: Mapping[str, Any]
    rows: Sequence[Row]


# -- reading ----------------------------------------------------------------------------------


def read_records(folder: Path, say: Callable[[str], object]) -> list[Record]:
    """The records of a folder that can be drawn, oldest first; `say` is told why others are not.

    Raises:
        InputError: no folder, or no record in it that can be drawn.
    """
    if not folder.is_dir():
        raise InputError(f"expected a folder of records, got {folder}: tresnet bench writes one")
    records = []
    for path in sorted(path for path in folder.glob("*.json") if path.is_file()):
        try:
            record = read_record(path)
        except InputError as error:
            say(f"warning: not drawn: {error}")
            continue
        if record.what in DRAWN:
            records.append(record)
        else:
            say(f"not drawn: {record.name}, a record of {record.what}")
    if not records:
        raise InputError(
            f"expected records (*.json) of {', '.join(DRAWN)} in {folder}, found none: "
            "measure first"
        )
    return sorted(records, key=lambda one: (one.date_utc, one.name))


def read_record(path: Path) -> Record:
    """One record, whose tables can be drawn.

    Raises:
        InputError: the file is unreadable, damaged, or of another format; its name is in the text.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, not {FORMAT}")
        about = content["environment"]
        datetime.fromisoformat(about["date_utc"])
        device, threads = about["device"], about["cpu"]["torch_threads"]
        on_gpu, limit_w = device["type"] == "cuda", device.get("power_limit_w")
        title = f"CPU: {about['cpu']['model'] or 'of unknown model'}, {threads:d} threads"
        if on_gpu:
            title = device["name"] + ("" if limit_w is None else f" at {limit_w:.0f} W")
        record = Record(
            name=path.name,
            what=content["what"],
            command=content["command"],
            date_utc=about["date_utc"],
            title=f"{title}, PyTorch {about['packages']['torch']}",
            on_gpu=on_gpu,
            settings=content["settings"],
            rows=content["rows"],
        )
        tables(record)
    except (OSError, ValueError, RecursionError, ArithmeticError) as error:
        fault = str(error)
    except KeyError as error:
        fault = f"a file without {error}"
    except (TypeError, AttributeError) as error:
        fault = f"values of another type ({error})"
    else:
        return record
    raise InputError(
        f"{path}: expected a sound record, got {fault[:200]}: remove it, or measure again"
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} for a number")


def sections(records: Iterable[Record]) -> list[list[Record]]:
    """Records by device and PyTorch version, GPUs first, each section oldest first."""
    groups: dict[tuple[bool, str], list[Record]] = {}
    for record in records:
        groups.setdefault((not record.on_gpu, record.title), []).append(record)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0])]


# -- what rows say ----------------------------------------------------------------------------


def contender(row: Row) -> str:
    """Who a row speaks for: a model, the package of its norm if that is another's, its input."""
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


def speed_ratio(record: Record, ours: Row, row: Row) -> float | None:
    """Images/s of `ours` over those of `row`: the median over rounds where they took turns."""
    if min(_value(ours, "p50_images_per_s"), _value(row, "p50_images_per_s")) <= 0:
        return None
    pairs = zip(ours["round_p50_images_per_s"], row["round_p50_images_per_s"], strict=False)
    ratios = [own / theirs for own, theirs in pairs]
    if record.settings.get("interleave") and ratios:
        return statistics.median(ratios)
    return ours["p50_images_per_s"] / row["p50_images_per_s"]


# -- tables -----------------------------------------------------------------------------------


def section_markdown(section: Sequence[Record], above: Sequence[str] = ()) -> str:
    """Every table of a section, below pictures or other Markdown of the whole section."""
    parts = [f"### {section[0].title}", *above]
    for record in section:
        if drawn := tables(record):
            source = f"Record: `{record.name}` ({record.date_utc}), `{record.command}`"
            parts += [*drawn, source]
    return "\n\n".join(parts)


def tables(record: Record) -> list[str]:
    """The tables of a record in Markdown, each with its title, and what failed."""
    drawn = [
        table for draw in DRAWN.get(record.what, ()) if record.rows and (table := draw(record))
    ]
    failures = dict.fromkeys(
        f"* {_whose(row)}: {row['status'].replace('_', ' ')}: {row['error']}"
        for row in record.rows
        if drawn and row["status"] != "ok"
    )
    return [*drawn, "\n".join(failures)] if failures else drawn


def _whose(row: Row) -> str:
    if "op" in row:
        return f"{row['contender']}, {row['op']}"
    return f"{contender(row)}, batch {row['batch_size']}, {settings_of(row)}"


def speed_table(record: Record) -> str:
    """The fastest case of each contender, and how much faster our first one is."""
    rows = best_rows(record.rows)
    ours = _ours(rows)
    tried = collections.Counter((contender(row), row["input_size"]) for row in record.rows)
    peak = "Peak MiB" if record.on_gpu else "Peak MiB of the process"
    ratio = f"{contender(ours)} ÷ it"
    header = ["model", "its best settings", "of", "batch", "images/s", ratio, peak]
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
    return _table(title, header, lines)


def memory_table(record: Record) -> str:
    """Peak memory by batch size, where a case was measured at several."""
    cases: dict[tuple[str, str], dict[int, float]] = {}
    for row in record.rows:
        peak = peak_mib(row)
        if row["status"] == "ok" and peak is not None:
            cases.setdefault((contender(row), settings_of(row)), {})[row["batch_size"]] = peak
    if max(map(len, cases.values()), default=0) < 2:
        return ""
    batches = sorted({batch for peaks in cases.values() for batch in peaks})
    first = next((case for case in cases if ":" not in case[0]), next(iter(cases)))
    ours = cases[first]

    def cell(peak: float | None, our_peak: float | None) -> str:
        beside = "" if peak is None or our_peak is None else f" ({our_peak / peak:.2f})"
        return _number(peak) + beside

    header = ["model", "settings", *(f"batch {batch}" for batch in batches)]
    lines = [
        [*case, *(cell(peaks.get(batch), ours.get(batch)) for batch in batches)]
        for case, peaks in cases.items()
    ]
    return _table(f"**Peak MiB of a training step** (in brackets {first[0]} ÷ it):", header, lines)


def largest_table(record: Record) -> str:
    """The largest training batch of each case."""
    rows = best_rows(record.rows, "largest_batch")
    ours = _ours(rows)
    most, limit_mib = _value(ours, "largest_batch"), ours["memory_limit_mib"]
    header = ["model", "settings", "largest batch", "ended by", f"{contender(ours)} ÷ it"]
    lines = []
    for row in rows:
        found = _value(row, "largest_batch")
        largest = f"{found:.0f}" if found > 0 else row["status"]
        ratio = _number(most / found if min(most, found) > 0 else None, 2)
        lines.append([contender(row), settings_of(row), largest, row["limited_by"] or "-", ratio])
    within = "" if limit_mib is None else f" in {limit_mib / 1024:,.1f} GiB"
    return _table(f"**Largest training batch**{within}:", header, lines)


def ops_table(record: Record) -> str:
    """Bandwidth of the ideal bytes of each operation, and its share of a copy's."""
    contenders = list(dict.fromkeys(row["contender"] for row in record.rows))
    places: dict[tuple[str, ...], dict[str, str]] = {}
    for row in record.rows:
        shape = " x ".join(map(str, row["shape"]))
        key = (row["op"], row["place"], shape, row["dtype"], row["direction"])
        rate, share = row["gb_per_s"], row["share_of_copy"]
        of_copy = "" if share is None else f" ({share:.0%})"
        cell = row["status"].replace("_", " ") if rate is None else _number(rate) + of_copy
        places.setdefault(key, {})[row["contender"]] = cell
    header = ["operation", "where", "input", "dtype", "direction", *contenders]
    lines = [[*key, *(cells.get(one, "-") for one in contenders)] for key, cells in places.items()]
    title = "**Operations**, GB/s of the ideal bytes (share of a copy of the same bytes):"
    return _table(title, header, lines)


DRAWN: dict[str, tuple[Callable[[Record], str], ...]] = {
    "bench_train": (speed_table, memory_table),
    "bench_infer": (speed_table,),
    "bench_max_batch": (largest_table,),
    "bench_ops": (ops_table,),
}


def _number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value:,.{max(digits, 1) if abs(value) < 100 else digits}f}"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.replace("|", "/").split()) for cell in line] for line in lines]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in cells)])


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


# -- the picture ---------------------------------------------------------------------------------


def speed_points(section: Sequence[Record], what: str) -> list[tuple[Row, str]]:
    """Each contender at its best in all records of a kind, with the name of the record."""
    records = [record for record in section if record.what == what]
    sources = {id(row): record.name for record in records for row in record.rows}
    best = best_rows(row for record in records for row in record.rows)
    return [(row, sources[id(row)]) for row in best if row["status"] == "ok"]


def published_top1(model: str, input_size: int | None) -> Mapping[str, float]:
    """ImageNet-1k top-1, in percent, of a model's published weights at an input size, by name.

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


def draw_picture(section: Sequence[Record], folder: Path, suffix: str) -> Path | None:
    """Draw images/s of each contender of a section against the accuracy of its published weights.

    Args:
        section: one device, one PyTorch version.
        folder: where to, existing; an earlier picture of the section is replaced.
        suffix: `png` or `svg`.

    Returns:
        The file; None where no contender has published weights.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    title = section[0].title
    panels = {what: found for what in STEPS if (found := speed_points(section, what))}
    points = [point for found in panels.values() for point in found]
    if not any(published_top1(row["model"], row["input_size"]) for row, _ in points):
        return None
    with needed("a picture", "plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    # A figure of its own: pyplot would keep it and may look for a screen.
    figure = Figure(figsize=(2 + 6 * len(panels), 5.5), layout="constrained")
    names = list(dict.fromkeys(contender(row) for row, _ in points))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (what, found) in zip(axes, panels.items(), strict=True):
        for row, _ in found:
            _plot(ax, row, names.index(contender(row)))
        ax.set_xlabel(f"images/s, {STEPS[what]}, each at its best settings")
        ax.set_ylabel("ImageNet top-1 of published weights (not measured here), %")
        ax.set_xlim(left=0)
        ax.margins(x=0.1, y=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    figure.suptitle(title, x=0.01, ha="left")
    records = ", ".join(dict.fromkeys(name for _, name in points))
    figure.supxlabel(f"records: {records}", fontsize=6, x=0.01, ha="left")
    slug = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace(", pytorch ", "-torch"))
    path = folder / f"speed_{slug}.{suffix}"
    with mpl.rc_context({"svg.hashsalt": path.stem}):  # the same picture is the same file
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    return path


def _plot(ax: "Axes", row: Row, index: int) -> None:
    """A contender's speed, once for each of its published weights."""
    top1 = published_top1(row["model"], row["input_size"])
    speeds = [row["p50_images_per_s"]] * len(top1)
    color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
    label = contender(row)
    ax.plot(speeds, list(top1.values()), label=label, color=color, marker=marker, linestyle="")
    for weights, y in top1.items():
        ax.annotate(weights, (speeds[0], y), xytext=(0, 7), fontsize=7, ha="right",
                    textcoords="offset points")  # fmt: skip
