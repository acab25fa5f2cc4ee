"""Draw the figures of README and docs from records: `python benchmarks/pictures.py`.

Each figure is written twice under docs/pictures, as SVG for light and for dark pages. Two options
make records first: `--record memory` predicts memory, `--record run RUN_DIR` copies a run's log.
"""

import argparse
import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PICTURES = ROOT / "docs" / "pictures"
PEERS = RECORDS / "timm_infer_rtx4090_2024-09-05.csv"
MEMORY = RECORDS / "memory_predicted_tresnet_m.json"
RUN = RECORDS / "train_digits.csv"

OURS, OTHERS, THIRD = "#d9480f", "#868e96", "#1971c2"
THEMES = {"light": "#24292f", "dark": "#e6edf3"}
# Offsets of labels from their dots, in points, where the default offset would overlap other labels.
SHIFTED = {
    "tresnet_m.miil_in1k": (7, -12),
    "resnet50": (-20, 8),
    "convnext_tiny.fb_in22k_ft_in1k": (-92, -3),
    "efficientnetv2_rw_s": (-102, -3),
    "seresnext50_32x4d": (-42, -15),
    "efficientnet_b3": (6, -11),
    "swin_tiny": (-50, -13),
    "tresnet_l": (-55, 1),
    "resnet101": (-56, -3),
}


def speed_and_accuracy(axes: Any, ink: str) -> None:
    """Plot top-1 over images per second, from timm's published benchmark files."""
    lines = [line for line in PEERS.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        name, _, tag = row["weights"].partition(".")
        ours, more_data = name.startswith("tresnet"), "in2" in tag
        x, y = float(row["images_per_s"]), float(row["top1_pct"])
        colour = OURS if ours else OTHERS
        face = "none" if more_data else colour
        axes.scatter(x, y, s=42 if ours else 26, color=colour, facecolors=face, zorder=3)
        label = name.split("_patch")[0] + (" (21k)" if more_data else "")
        shift = SHIFTED.get(row["weights"], SHIFTED.get(name.split("_patch")[0], (7, -3)))
        weight = "bold" if ours else "normal"
        axes.annotate(
            label, (x, y), shift, textcoords="offset points", size=8, color=ink, weight=weight
        )
    axes.set_xscale("log")
    ticks = [2000, 3000, 4000, 5000, 6000, 8000]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("images per second, inference (RTX 4090, AMP, channels_last, PyTorch 2.4)")
    axes.set_ylabel("ImageNet top-1, %")


def predicted_memory(axes: Any, ink: str) -> None:
    """Plot the predicted peak memory of a training step over the batch size."""
    record = json.loads(MEMORY.read_text())
    for line, colour in zip(record["lines"], (OTHERS, OURS, THIRD), strict=True):
        gib = [mib / 1024 for mib in line["peak_allocated_mib"]]
        axes.plot(record["batch_sizes"], gib, marker="o", ms=4, color=colour, label=line["name"])
    axes.set_xlabel("batch size (tresnet_m, 224 pixels, bf16 autocast, channels_last, SGD)")
    axes.set_ylabel("predicted peak, GiB")
    axes.legend(frameon=False, labelcolor=ink, fontsize=8)


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
    "predicted_memory": (predicted_memory, MEMORY, (6.4, 3.2)),
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
    """Write the record of the predicted memory of timm's tresnet_m and of ours."""
    from tresnet import memory

    batch_sizes = [32, 64, 128, 192, 256, 384, 512]
    settings = {"amp": "bf16", "channels_last": False}
    cases = {
        "timm tresnet_m": ("timm:tresnet_m", {}),
        "tresnet_m": ("tresnet_m", {}),
        "tresnet_m, grad checkpointing": ("tresnet_m", {"grad_checkpointing": True}),
    }
    lines = []
    for name, (model, options) in cases.items():
        peaks = [
            memory.predict(model, batch_size=n, **options, **settings).allocated.mib
            for n in batch_sizes
        ]
        lines.append({"name": name, "peak_allocated_mib": [round(peak, 1) for peak in peaks]})
    content = {
        "what": "peak allocated memory of a training step as tresnet.memory.predict predicts it; "
        "not measured",
        "command": "python benchmarks/pictures.py --record memory",
        "settings": {key: str(value) for key, value in settings.items()},
        "batch_sizes": batch_sizes,
        "lines": lines,
    }
    MEMORY.write_text(json.dumps(content, indent=1) + "\n")


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
