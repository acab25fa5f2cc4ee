"""Draw the figures of README and docs from records: `python benchmarks/pictures.py`.

Each figure is written twice under docs/pictures, as SVG for light and for dark pages. Two options
make records first: `--record memory` predicts what records measured, `--record run RUN_DIR` copies
a run's log.
"""

import argparse
import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PICTURES = ROOT / "docs" / "pictures"
PEERS = RECORDS / "timm_infer_rtx5090_torch2.9.csv"
MEMORY = RECORDS / "memory_compared.json"
TRAIN = RECORDS / "bench_train_h200_torch2.11.0_2026-11-26.json"
INFER = RECORDS / "bench_infer_h200_torch2.11.0_2026-11-26.json"
INFER_SMALL = RECORDS / "bench_infer_h200_torch2.11.0_2026-11-26_2.json"
RUN = RECORDS / "train_digits.csv"

OURS, OTHERS, THIRD = "#d9480f", "#868e96", "#1971c2"
THEMES = {"light": "#24292f", "dark": "#e6edf3"}
# Tags that get a label, with its offset from the dot in points; all other tags are dots.
LABELS = {
    "tresnet_m.miil_in21k_ft_in1k": ("tresnet_m (21k)", (6, 3)),
    "tresnet_m.miil_in1k": ("tresnet_m", (-58, -3)),
    "tresnet_v2_l.miil_in21k_ft_in1k": ("tresnet_v2_l (21k)", (5, 5)),
    "tresnet_l.miil_in1k": ("tresnet_l", (4, -11)),
    "tresnet_xl.miil_in1k": ("tresnet_xl", (4, -11)),
    "tresnet_m.miil_in1k_448": ("tresnet_m, 448", (-10, -13)),
    "tresnet_l.miil_in1k_448": ("tresnet_l, 448", (-20, -13)),
    "tresnet_xl.miil_in1k_448": ("tresnet_xl, 448", (-8, 7)),
    "resnet50.tv2_in1k": ("resnet50", (8, -2)),
    "hgnetv2_b4.ssld_stage2_ft_in1k": ("hgnetv2_b4", (6, 3)),
    "levit_conv_384.fb_dist_in1k": ("levit_384", (5, 4)),
    "tiny_vit_21m_224.dist_in22k_ft_in1k": ("tiny_vit_21m (22k)", (6, 3)),
    "vit_base_patch16_clip_224.laion2b_ft_in12k_in1k": ("vit_base, CLIP (2b)", (6, 3)),
}


def speed_and_accuracy(axes: Any, ink: str) -> None:
    """Plot top-1 over images per second, from timm's published benchmark files."""
    lines = [line for line in PEERS.read_text().splitlines() if not line.startswith("#")]
    rows = sorted(csv.DictReader(lines), key=lambda row: int(row["image_size"]))
    dots = {(float(r["images_per_s"]), float(r["top1_pct"])): r["weights"] for r in rows}
    for ours, style in ((False, {"s": 6, "alpha": 0.45}), (True, {"s": 36, "zorder": 3})):
        chosen = [dot for dot, tag in dots.items() if tag.startswith("tresnet") == ours]
        axes.scatter(*zip(*chosen, strict=True), color=OURS if ours else OTHERS, lw=0, **style)
    for tag, (text, shift) in LABELS.items():  # where a tag has several sizes, the smallest
        dot = next(dot for dot, name in dots.items() if name == tag)
        weight = "bold" if tag.startswith("tresnet") else "normal"
        axes.annotate(text, dot, shift, textcoords="offset points", size=8, color=ink,
                      weight=weight)  # fmt: skip
    axes.set_xscale("log")
    ticks = [1000, 2000, 4000, 8000, 16000]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(78, 87.5)
    axes.set_xlabel("images per second, inference (RTX 5090, AMP, torch.compile, PyTorch 2.9)")
    axes.set_ylabel("ImageNet top-1, %")


def speed(axes: Any, ink: str) -> None:
    """Plot rates on an H200 as fractions of the rate of timm's compiled model."""
    groups = (
        ("training, batch 256", TRAIN, 256),
        ("inference, batch 256", INFER, 256),
        ("inference, batch 16", INFER_SMALL, 16),
        ("inference, batch 1", INFER_SMALL, 1),
    )
    bars = (("timm, eager", OTHERS), ("timm, compiled", THIRD), ("tresnet, as by default", OURS))
    for y, (_, path, batch_size) in enumerate(groups):
        rows = [r for r in _rows(path) if r["batch_size"] == batch_size]
        if path is INFER_SMALL:  # the other record has the eager steps
            rows += [r for r in _rows(INFER) if r["batch_size"] == batch_size and not r["replayed"]]
        rates = {name: _rate(rows, name) for name, _ in bars}
        for index, (name, colour) in enumerate(bars):
            rate, where = rates[name], y + 0.27 * (index - 1)
            if rate is None:
                axes.annotate("not measured", (0, where), (3, -3), textcoords="offset points",
                              size=7, color=ink)  # fmt: skip
            else:
                fraction = rate / rates["timm, compiled"]
                axes.barh(where, fraction, 0.24, color=colour, label=name if y == 0 else None)
                text = f"{rate:,.0f}" + ("" if index == 1 else f" ({fraction:.2f} x)")
                axes.annotate(text, (fraction, where), (3, -3), textcoords="offset points", size=7,
                              color=ink)  # fmt: skip
    axes.set_yticks(range(len(groups)), [name for name, *_ in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.36)
    axes.set_xlabel("images/s of tresnet_m, relative to timm's compiled model (H200, bf16)")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(bars)}
    axes.legend(frameon=False, labelcolor=ink, fontsize=8, **above)
    axes.grid(axis="y", visible=False)


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def _rate(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the best median rate of the contenders that `name` describes, or None."""
    ours, compiled = name.startswith("tresnet"), name.endswith("compiled")
    rates = [
        row["p50_images_per_s"]
        for row in rows
        if row["model"].startswith("timm:") != ours
        and (row["compile"] != "none") == compiled
        and row["replayed"] == ours
        and (not ours or row["recompute"] is None)
    ]
    return max(rates, default=None)


def memory(axes: Any, ink: str) -> None:
    """Plot measured peaks of eager training steps as bars, and their predictions as lines."""
    rows = json.loads(MEMORY.read_text())["rows"]
    for y, row in enumerate(rows):
        measured, predicted = (
            row[key]["allocated_mib"] / 1024 for key in ("measured", "predicted")
        )
        axes.barh(y, measured, 0.55, color=OTHERS, alpha=0.6, label="measured" if y == 0 else None)
        axes.plot([predicted] * 2, [y - 0.42, y + 0.42], color=OURS, lw=2,
                  label="predicted" if y == 0 else None)  # fmt: skip
        axes.annotate(f"{100 * (predicted / measured - 1):+.2f} %", (measured, y), (6, -3),
                      textcoords="offset points", size=7, color=ink)  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], size=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 12.4)
    axes.set_xlabel("peak of allocated memory of a training step, GiB")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
    axes.legend(frameon=False, labelcolor=ink, fontsize=8, **above)
    axes.grid(axis="y", visible=False)


def digits_run(axes: Any, ink: str) -> None:
    """Plot loss and accuracy of the run on the digits over the epochs."""
    with RUN.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "train"]
    epochs = [int(row["epoch"]) for row in rows]
    axes.plot(epochs, [float(row["loss"]) for row in rows], color=OTHERS)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss", color=OTHERS)
    right = axes.twinx()
    right.plot(epochs, [float(row["val_top1"]) for row in rows], color=OURS)
    right.set_ylabel("top-1 on the held-out digits, %", color=OURS)
    right.tick_params(colors=ink)
    right.spines[:].set_visible(False)


def architecture(axes: Any, ink: str) -> None:
    """Draw the stages of tresnet_m, and its two kinds of blocks at stride 2, as boxes."""
    import tresnet
    from tresnet.layers.squeeze_excite import SqueezeExcite

    model = tresnet.create("tresnet_m", device="meta")
    sides = [224 // info["reduction"] for info in model.feature_info]
    sizes = [
        f"{info['num_chs']} x {n} x {n}" for info, n in zip(model.feature_info, sides, strict=True)
    ]
    body = model.body
    kinds = []
    for stage in (body.layer1, body.layer2, body.layer3, body.layer4):
        squeezes = any(isinstance(module, SqueezeExcite) for module in stage.modules())
        kinds.append(f"{len(stage)} x {type(stage[0]).__name__}{' + SE' * squeezes}")
    rows = [
        ["image\n3 x 224 x 224", "space to depth\n48 x 56 x 56", f"conv 3x3\n{sizes[0]}"]
        + [f"{kind}\n{size}" for kind, size in zip(kinds, sizes[1:], strict=True)]
        + ["mean, linear\n1000"],
        ["BasicBlock", "conv 3x3", "blur /2", "conv 3x3\nno activation", "SE", "+ shortcut, ReLU"],
        ["Bottleneck", "conv 1x1", "conv 3x3", "blur /2", "SE", "conv 1x1\nno activation",
         "+ shortcut, ReLU"],
        ["shortcut", "mean 2x2 /2", "conv 1x1\nno activation"],
    ]  # fmt: skip
    for y, row in zip((3, 2, 1, 0), rows, strict=True):
        for x, text in enumerate(row):
            named = y < 3 and x == 0
            colour = "none" if named else (OURS if " x B" in text else OTHERS)
            box = {"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": colour}
            weight = "bold" if named else "normal"
            axes.text(x, y, text, ha="center", va="center", size=7, color=ink, bbox=box,
                      weight=weight)  # fmt: skip
            if x and not (y < 3 and x == 1):
                axes.annotate("", (x - 0.4, y), (x - 0.6, y),
                              arrowprops={"arrowstyle": "->", "color": OTHERS})  # fmt: skip
    axes.set_xlim(-0.5, 7.5)
    axes.set_ylim(-0.5, 3.5)
    axes.axis("off")


DRAWINGS: dict[str, tuple[Callable[[Any, str], None], Path, tuple[float, float]]] = {
    "speed_and_accuracy": (speed_and_accuracy, PEERS, (7.6, 4.2)),
    "speed": (speed, TRAIN, (7.6, 3.8)),
    "memory": (memory, MEMORY, (8.0, 3.8)),
    "digits_run": (digits_run, RUN, (6.4, 3.0)),
    "architecture": (architecture, ROOT / "tresnet" / "models" / "zoo.py", (11.0, 3.2)),
}


def draw(name: str) -> None:
    """Draw one figure as `NAME-light.svg` and `NAME-dark.svg`."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": name, "font.size": 9})
    function, _, size = DRAWINGS[name]
    for theme, ink in THEMES.items():
        figure, axes = plt.subplots(figsize=size)
        axes.tick_params(colors=ink)
        axes.xaxis.label.set_color(ink)
        axes.yaxis.label.set_color(ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(ink)
        axes.grid(color=OTHERS, alpha=0.2, lw=0.6)
        function(axes, ink)
        figure.tight_layout()
        path = PICTURES / f"{name}-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def record_memory() -> None:
    """Write the record of measured peaks of eager training steps on GPUs, with predictions."""
    from benchmarks import memory_accuracy as accuracy

    rows = []
    for path in sorted(RECORDS.glob("memory_matrix_*.json")):
        record = json.loads(path.read_text())
        for row in accuracy.predict_again(record):
            if row["step"].get("train", True):
                step = {"batch_size": accuracy.BATCH_SIZE, **row["step"]}
                about = {"gpu": record["environment"]["device"]["name"], "record": path.name}
                rows.append({**row, "step": step, **about})
    rows += [
        r for r in accuracy.predict_benchmarks(RECORDS) if r["record"] not in accuracy.LEFT_MIB
    ]
    content = {
        "what": "peaks of eager training steps that records measured, and new predictions of them",
        "command": "python benchmarks/pictures.py --record memory",
        "rows": [
            {
                "label": _label(row),
                **{name: row[name] for name in ("model", "step", "gpu", "record")},
                **{name: _rounded(row[name]) for name in ("measured", "predicted")},
            }
            for row in rows
        ],
    }
    MEMORY.write_text(json.dumps(content, indent=1) + "\n")


def _label(row: dict[str, Any]) -> str:
    step, gpu = row["step"], re.search("[AH][0-9]+", row["gpu"])
    precision = "fp32" if step["amp"] == "off" else step["amp"]
    where = row["gpu"] if gpu is None else gpu[0]
    return f"{row['model']}, {step['batch_size']}, {precision}, {step['opt']}, {where}"


def _rounded(sizes: dict[str, float]) -> dict[str, float]:
    return {name: round(mib, 1) for name, mib in sizes.items()}


def main() -> None:
    """Write the requested record, then draw each figure whose record exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", nargs="+", default=[], metavar="memory | run RUN_DIR")
    record = parser.parse_args().record
    if record == ["memory"]:
        record_memory()
    elif len(record) == 2 and record[0] == "run":
        shutil.copyfile(Path(record[1]) / "log.csv", RUN)
    elif record:
        parser.error(f"expected memory, or run RUN_DIR, got {' '.join(record)}")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (_, path, _) in DRAWINGS.items():
        if path.is_file():
            draw(name)


if __name__ == "__main__":
    main()
