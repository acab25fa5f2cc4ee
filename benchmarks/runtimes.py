"""Times a model on the CPU in PyTorch, onnxruntime and OpenVINO, in turns; writes one record.

OMP_NUM_THREADS=2 python benchmarks/runtimes.py
"""

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tresnet
from tresnet.export.formats import FORMATS, Job, open_onnx, open_openvino, open_pt2
from tresnet.export.images import Images
from tresnet.export.plain import plain_model, trace
from tresnet.measure.records import write_record
from tresnet.steps import InferenceCompute, InferenceStep

WARMUP = 3
Call = Callable[[], Any]


def contenders(name: str, size: int, batch: int, scratch: Path) -> dict[tuple[str, str], Call]:
    """What is timed, by runtime and type: each a call that computes the same images."""
    torch.manual_seed(0)
    model = tresnet.create(name).eval()
    images = Images(3, size, size, model.config.block_size, False, "float")
    x = images.prepare(images.random(batch, size, size))
    program = trace(plain_model(model), images, x.device)

    def written(format: str, *calibration: Tensor) -> Path:
        file = scratch / f"{len(calibration)}{FORMATS[format].suffixes[0]}"
        # Ranges taken from noise: the accuracy is of no use, the time is the same.
        FORMATS[format].write(Job(program, images, {}, calibration or None), file)
        return file

    onnx, onnx8, openvino = written("onnx"), written("onnx", x), written("openvino")
    quantised = torch.compile(open_pt2(written("pt2", x)), options={"freezing": True})
    return {
        ("PyTorch eager", "fp32"): ours(model, x),
        ("PyTorch compiled", "fp32"): ours(model, x, compile="default", freeze=True),
        ("PyTorch compiled", "bf16"): ours(model, x, compile="default", freeze=True, dtype="bf16"),
        ("PyTorch compiled", "int8"): torch.no_grad()(lambda: quantised(x)),
        ("onnxruntime", "fp32"): partial(open_onnx(onnx), x),
        ("onnxruntime", "int8"): partial(open_onnx(onnx8), x),
        ("OpenVINO", "fp32"): partial(open_openvino(openvino), x),
        ("OpenVINO", "bf16"): partial(open_openvino(openvino, precision="bf16"), x),
        ("OpenVINO", "int8"): partial(open_openvino(onnx8), x),
    }


def ours(model: nn.Module, x: Tensor, **compute: Any) -> Call:
    """The package's own inference step, folded."""
    settings = InferenceCompute(channels_last=True, **compute)
    step = InferenceStep(copy.deepcopy(model), settings, x.device, say=lambda line: None)
    return partial(step, step.feed.images(x))


def main() -> None:
    """Time and record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="tresnet_m")
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--turns", type=int, default=21)
    options.add_argument("--note", default="", help="about the machine while this ran")
    options.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "records")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        calls = contenders(asked.model, asked.size, asked.batch, Path(scratch))
        for call in calls.values():
            for _ in range(WARMUP):
                call()
        times_s: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        load_before = os.getloadavg()[0]
        for turn in range(asked.turns):  # there and back: a drift meets all alike
            for key in list(calls)[:: 1 if turn % 2 else -1]:
                began_s = time.perf_counter()
                calls[key]()
                times_s[key].append(time.perf_counter() - began_s)
    rows = []
    for (runtime, dtype), seconds in times_s.items():
        least, p20, p50, p80 = (1e3 * np.percentile(seconds, (0, 20, 50, 80))).tolist()
        times_ms = {"least_ms": least, "p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
        rows.append({"runtime": runtime, "dtype": dtype, **times_ms})
        print(f"{runtime:18}{dtype:6}" + "".join(f"{ms:9.1f}" for ms in times_ms.values()))
    settings = {key: value for key, value in vars(asked).items() if key != "output_dir"}
    settings["load_average"] = [load_before, os.getloadavg()[0]]
    settings["runtimes"] = {name: version(name) for name in ("onnxruntime", "openvino", "torchao")}
    print(
        write_record(
            asked.output_dir,
            "runtimes",
            device=None,
            settings=settings,
            rows=rows,
            warmup_steps=WARMUP,
            runs=asked.turns,
        )
    )


if __name__ == "__main__":
    main()
