"""Compare predictions of GPU memory with measurements on a GPU, and write a record.

    python benchmarks/memory_accuracy.py [MODEL ...]        # all our models and twelve peers
    python benchmarks/memory_accuracy.py --max-batch MODEL  # the predicted batch, and 10 % more

Our models train with SGD and AdamW, and run inference, each in fp32 and bf16. Peers train in fp32
with SGD and in bf16 with AdamW. `tests/memory/test_gpu_records.py` compares the measurements of
committed records with new predictions.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tresnet.cli import shell
from tresnet.devices import usable_device
from tresnet.measure.cases import BenchCase
from tresnet.measure.phases import measure_in_new_process
from tresnet.measure.records import RecordFile
from tresnet.memory import Device, MaxBatch, describe_device, max_batch, predict
from tresnet.models.zoo import list_models
from tresnet.settings.fields import replace

PEERS = tuple(
    f"timm:{name}"
    for name in (
        *("resnet50", "seresnext50_32x4d", "tresnet_m", "densenet121", "efficientnet_b0"),
        *("mobilenetv3_large_100", "regnety_032", "nf_resnet50", "convnext_tiny"),
        *("vit_small_patch16_224", "swin_tiny_patch4_window7_224", "vgg16_bn"),
    )
)
BATCH_SIZE = 64
# Allowed errors of the predictor, in percent of the measurement.
ALLOCATED_MEAN_PERCENT = 2.0
ALLOCATED_PERCENT = 5.0
RESERVED_PERCENT = 10.0

Row = dict[str, Any]


def matrix(models: Sequence[str] = ()) -> list[Row]:
    """Return the steps to compare, as arguments of `predict`, of all models or of `models`."""
    steps = [{"amp": amp, "opt": opt} for amp in ("off", "bf16") for opt in ("sgd", "adamw")]
    infer = [{"amp": amp, "train": False} for amp in ("off", "bf16")]
    rows = [{"model": name, "step": step} for name in list_models() for step in (*steps, *infer)]
    rows += [{"model": name, "step": step} for name in PEERS for step in (steps[0], steps[3])]
    return [row for row in rows if not models or row["model"] in models]


def predicted(row: Row, device: Device | None = None) -> Row:
    """Return a row with its prediction added, and with errors if it has a measurement."""
    p = predict(row["model"], batch_size=BATCH_SIZE, device=device, **row["step"])
    sizes = {"allocated_mib": p.allocated.mib, "reserved_mib": p.reserved.mib}
    errors = {
        f"{what}_error_percent": 100 * (sizes[f"{what}_mib"] / row["measured"][f"{what}_mib"] - 1)
        if row.get("measured")
        else None
        for what in ("allocated", "reserved")
    }
    return {**row, "predicted": sizes, **errors}


def measured(row: Row, run: Callable[[BenchCase, bool], Row]) -> Row:
    """Return a row with a measurement added, or with the error; `run` measures in a new process."""
    step = {name: value for name, value in row["step"].items() if name != "train"}
    # cuda_graph="off", because the predictions are of eager steps
    case = replace(BenchCase(row["model"], BATCH_SIZE), cuda_graph="off", **step)
    result = run(case, row["step"].get("train", True))
    if "error" in result:
        return {**row, "measured": None, "error": result["error"]}
    after = result["phases"]["train"]
    numbers = {"allocated_mib": after["max_allocated_mib"], "reserved_mib": after["reserved_mib"]}
    return {**row, "measured": numbers, "error": None}


def predict_again(record: Mapping[str, Any]) -> list[Row]:
    """Return a record's measured rows with new predictions for the record's GPU."""
    device = device_of(record)
    return [predicted(row, device) for row in record["rows"] if row["measured"]]


# cuBLAS's workspaces of 32 MiB, left by earlier runs of the process: of two graphs of training (of
# the threads of forward and backward) and two of inference. Since 02e7d1d3, runs clear them.
LEFT_MIB = {"bench_train_h200_torch2.11.0_2026-11-26_2.json": 6 * 32}


def predict_benchmarks(folder: Path) -> Iterator[Row]:
    """Yield eager steps that `tresnet bench train` measured on GPUs, with new predictions."""
    for path in sorted(folder.glob("bench_train_*.json")):
        record = json.loads(path.read_text())
        if record["environment"]["device"]["type"] != "cuda":
            continue
        device, left_mib = device_of(record), LEFT_MIB.get(path.name, 0)
        for row in record["rows"]:
            if row["status"] != "ok" or row["replayed"] or row["compile"] != "none":
                continue
            names = "batch_size", "amp", "opt", "channels_last", "impl", "recompute"
            step = {name: row[name] for name in names if row[name] is not None}
            p = predict(row["model"], device=device, **step)
            yield {
                "model": row["model"],
                "step": step,
                "gpu": device.name,
                "record": path.name,
                "measured": {
                    "allocated_mib": row["max_allocated_mib"] - left_mib,
                    "reserved_mib": row["reserved_mib"] - left_mib,
                },
                "predicted": {"allocated_mib": p.allocated.mib, "reserved_mib": p.reserved.mib},
            }


def device_of(record: Mapping[str, Any]) -> Device:
    """Return the description of a record's GPU."""
    gpu = record["environment"]["device"]
    major, minor = map(int, gpu["compute_capability"].split("."))
    return describe_device(gpu["name"], int(gpu["memory_mib"] * 2**20), (major, minor))


def misses(rows: Sequence[Row]) -> list[str]:
    """Describe the predictions whose errors exceed the limits."""
    errors = [abs(row["allocated_error_percent"]) for row in rows if row.get("measured")]
    mean = sum(errors) / len(errors) if errors else 0
    faults = []
    if mean > ALLOCATED_MEAN_PERCENT:
        faults.append(f"allocated: mean error {mean:.2f} %, expected {ALLOCATED_MEAN_PERCENT} %")
    for row in rows:
        for what, limit in (("allocated", ALLOCATED_PERCENT), ("reserved", RESERVED_PERCENT)):
            error = row[f"{what}_error_percent"]
            if error is not None and abs(error) > limit:
                faults.append(
                    f"{row['model']} {row['step']}: {what} off by {error:+.2f} %, expected "
                    f"{limit} %"
                )
    return faults


def try_out(predicted: MaxBatch, run: Callable[[int], Row]) -> list[Row]:
    """Run the predicted largest batch and a batch 10 % larger; return whether each fitted."""
    largest, rows = predicted.batch_size, []
    for batch_size in (largest, max(round(largest * 1.1), largest + 1)) if largest else (1,):
        result, answer = run(batch_size), predicted.answer(batch_size).value
        ran, error = "phases" in result, result.get("error")
        full = error is not None and "out of memory" in error.lower()
        holds = {"yes": ran, "no": full, "uncertain": ran or full}[answer]
        row = {"batch_size": batch_size, "answer": answer, "ran": ran, "holds": holds}
        rows.append({**row, "error": error})
    return rows


def main() -> int:
    """Measure all cases; after each case, print a line and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--max-batch", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--output-dir", default="benchmarks/records")
    options = parser.parse_args()
    usable_device(options.device)
    about = {"device": options.device, "settings": {"batch_size": BATCH_SIZE}}
    what = "memory_max_batch" if options.max_batch else "memory_matrix"
    record = RecordFile(options.output_dir, what, **about)

    def run(case: BenchCase, training: bool) -> Row:
        return measure_in_new_process(case, training, options.device, options.timeout_s)

    rows: list[Row] = []
    if options.max_batch:
        for model in options.models:
            case = replace(BenchCase(model), amp="bf16")
            rows += try_out(
                max_batch(model, amp="bf16"),
                lambda n, case=case: run(dataclasses.replace(case, batch_size=n), True),
            )
            record.write(rows)
        print(*rows, sep="\n")
        return 0 if all(row["holds"] for row in rows) else 1
    for row in matrix(options.models):
        rows.append(predicted(measured(row, run)))
        record.write(rows)
        print(rows[-1])
    faults = misses(rows)
    print(*faults, sep="\n")
    return 1 if faults or any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(shell.run(main))
