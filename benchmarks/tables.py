#!/usr/bin/env python3
"""Print the rows of records as Markdown tables: `python benchmarks/tables.py [FOLDER]`.

Figures of different devices or PyTorch versions are not comparable, so each pair of a device and a
version has its own section, GPUs first. Ratios are taken from the records.
"""

import json
import sys
from pathlib import Path
from typing import Any

# For each kind of record: title, and for each column its header, its key and its format.
_CASE = [("model", "model", ""), ("batch", "batch_size", ""), ("settings", "settings", "")]
_STEPS = [
    *_CASE,
    ("images/s", "p50_images_per_s", ",.1f"),
    ("x first", "ratio_to_first", ".3f"),
    ("peak MiB", "max_allocated_mib", ",.0f"),
]
_LARGEST = [*_CASE, ("largest batch", "largest_batch", ""), ("ended by", "limited_by", "")]
_OPS = [
    *((key, key, "") for key in ("op", "place", "dtype", "direction", "contender")),
    ("GB/s of the ideal bytes", "gb_per_s", ",.1f"),
    ("of a copy", "ratio_to_copy", ".0%"),
]
_CONVOLUTIONS = [
    *((key, key, "") for key in ("launches", "size", "channels", "filters", "reduction", "after")),
    *((key, key, "") for key in ("batch", "dtype", "way")),
    ("us", "p50_us", ",.1f"),
    ("x today", "ratio_to_today", ".2f"),
]
TABLES = {
    "bench_train": ("Training step", _STEPS),
    "bench_infer": ("Inference", _STEPS),
    "bench_max_batch": ("Largest training batch", _LARGEST),
    "bench_ops": ("Operations", _OPS),
    "bench_cudnn_fused": ("Convolutions of a folded tresnet_m", _CONVOLUTIONS),
}


def title(record: dict[str, Any]) -> str:
    """Return a section's title: the GPU and its power limit or the CPU, and PyTorch's version."""
    about = record["environment"]
    device, cpu = about["device"], about["cpu"]
    name = f"CPU: {cpu['model'] or 'of unknown model'}, {cpu['torch_threads']} threads"
    if device["type"] == "cuda":
        limit_w = device.get("power_limit_w")
        name = device["name"] + ("" if limit_w is None else f" at {limit_w:.0f} W")
    return f"{name}, PyTorch {about['packages']['torch']}"


def table(record: dict[str, Any], name: str) -> str:
    """Return a record's Markdown table, and below it the file, date and command of the record."""
    heading, columns = TABLES[record["what"]]
    lines = [[header for header, *_ in columns], ["---"] * len(columns)]
    for row in record["rows"]:
        shown = {**row, "settings": _settings(row)}
        if row.get("max_allocated_mib") is None:
            shown["max_allocated_mib"] = row.get("rss_peak_mib")  # on a CPU
        if record["format"] < 3 and row.get("replayed"):
            shown["max_allocated_mib"] = None  # older formats left out CUDA graphs
        cells = ["-" if shown.get(k) is None else format(shown[k], spec) for _, k, spec in columns]
        lines.append(cells if row["status"] == "ok" else [*cells[:-1], _failure(row)])
    about = f"Record: `{name}` ({record['environment']['date_utc']}), `{record['command']}`"
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([f"**{heading}:**", "", *rows, "", about])


def _settings(row: dict[str, Any]) -> str:
    keys = ("input_size", "amp", "dtype", "norm", "impl", "recompute", "compile", "input")
    flags = (key for key in ("channels_last", "fold", "freeze", "replayed") if row.get(key))
    settings = (
        f"{key} {row[key]}" for key in keys if row.get(key) not in (None, False, "none", "off")
    )
    return ", ".join([*settings, *flags])


def _failure(row: dict[str, Any]) -> str:
    return f"{row['status'].replace('_', ' ')}: {' '.join(str(row['error']).split())}"


def main(folder: str = "benchmarks/records") -> int:
    """Print a section for each device and PyTorch version; return 1 if there are no records."""
    sections: dict[tuple[bool, str], list[tuple[str, str]]] = {}
    for path in sorted(Path(folder).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["what"] in TABLES:
            key = record["environment"]["device"]["type"] != "cuda", title(record)
            dated = record["environment"]["date_utc"], table(record, path.name)
            sections.setdefault(key, []).append(dated)
    for (_, name), tables in sorted(sections.items()):
        print("\n\n".join([f"### {name}", *(text for _, text in sorted(tables))]), end="\n\n")
    if not sections:
        print(f"no record of {', '.join(TABLES)} in {folder}: measure first", file=sys.stderr)
    return 0 if sections else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
