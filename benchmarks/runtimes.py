"""Time a model on the CPU in PyTorch, onnxruntime and OpenVINO, and write one record.

OMP_NUM_THREADS=2 python benchmarks/runtimes.py
"""

import argparse
import copy
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tresnet
from tresnet.export.formats import FORMATS, Job, open_onnx, open_openvino, open_pt2
from tresnet.export.image_spec import Images
from tresnet.export.plain import plain_model, trace
from tresnet.measure.contenders import speed
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, Rounds, run
from tresnet.measure.settings import RunSettings
from tresnet.settings import InferenceCompute
from tresnet.steps import InferenceStep

WARMUP, STEPS = 3, 3
Call = Callable[[], Any]


class Runtime(Contender):
    """A runtime that computes in one dtype."""

    def __init__(self, runtime: str, dtype: str, images: int, make: Callable[[], Call]) -> None:
        """Store `make`, which returns a function that runs the model on `images` images."""
        self.label, self.columns = f"{runtime}, {dtype}", {"runtime": runtime, "dtype": dtype}
        self.units, self._make = images, make

    def set_up(self) -> None:
        """Export or compile the model, then run warm-up calls."""
        self._call = self._make()
        for _ in range(WARMUP):
            self._call()

    def visit(self) -> list[float]:
        """Return the seconds of each of `STEPS` calls."""
        times_s = []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            self._call()
            times_s.append(time.perf_counter() - began_s)
        return times_s

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Return percentiles of the time of all calls."""
        times_s = list(itertools.chain(*rounds))
        return {"calls": len(times_s), **speed(times_s, self.units)}


def contenders(name: str, size: int, batch: int, scratch: Path) -> list[Contender]:
    """Return all runtimes, which get the same images and weights."""
    torch.manual_seed(0)
    model = tresnet.create(name).eval()
    images = Images(3, size, model.config.block_size)
    x = images.prepare(images.random(batch))
    program = trace(plain_model(model), images, x.device)

    def exported(format: str, *calibration: Tensor) -> Path:
        # Noise as calibration gives wrong 8-bit ranges, which change the accuracy but not the time.
        file = scratch / f"{format}{len(calibration)}{FORMATS[format].suffixes[0]}"
        if not file.exists():
            FORMATS[format].write(Job(program, images, {}, calibration or None), file)
        return file

    def ours(**compute: Any) -> Call:
        settings = InferenceCompute(**compute)
        step = InferenceStep(copy.deepcopy(model), settings, x.device, say=lambda line: None)
        return partial(step, step.feed.images(x))

    def ours_int8() -> Call:
        module = torch.compile(open_pt2(exported("pt2", x)), options={"freezing": True})
        return torch.no_grad()(lambda: module(x))

    compiled: dict[str, Any] = {"compile": "default", "freeze": True}
    runtimes: list[tuple[str, str, Callable[[], Call]]] = [
        ("PyTorch compiled", "fp32", partial(ours, **compiled)),
        ("PyTorch eager", "fp32", ours),
        ("onnxruntime", "fp32", lambda: partial(open_onnx(exported("onnx")), x)),
        ("OpenVINO", "fp32", lambda: partial(open_openvino(exported("openvino")), x)),
        ("PyTorch compiled", "bf16", partial(ours, dtype="bf16", **compiled)),
        (
            "OpenVINO",
            "bf16",
            lambda: partial(open_openvino(exported("openvino"), precision="bf16"), x),
        ),
        ("PyTorch compiled", "int8", ours_int8),
        ("onnxruntime", "int8", lambda: partial(open_onnx(exported("onnx", x)), x)),
        ("OpenVINO", "int8", lambda: partial(open_openvino(exported("onnx", x)), x)),
    ]
    return [Runtime(runtime, dtype, batch, make) for runtime, dtype, make in runtimes]


def main() -> None:
    """Time the runtimes, print a line for each, and write the record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="tresnet_m")
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--note", default="", help="facts about the machine, stored in the record")
    options.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "records")
    arguments = options.parse_args()
    packages = ("onnxruntime", "openvino", "torchao")
    record = RecordFile(
        arguments.output_dir,
        "runtimes",
        device=None,
        settings={
            **{key: value for key, value in vars(arguments).items() if key != "output_dir"},
            "load_average_before": os.getloadavg()[0],
            "packages": {name: version(name) for name in packages},
        },
        warmup_steps=WARMUP,
        runs=arguments.rounds * STEPS,
    )
    with tempfile.TemporaryDirectory() as scratch:
        group = contenders(arguments.model, arguments.size, arguments.batch, Path(scratch))
        options = {"rounds": arguments.rounds, "compiles": True}
        outcome = run([group], RunSettings(), log=print, record=record, **options)
    for label, row in zip(outcome.labels, outcome.rows, strict=True):
        print(f"{label:26}{row['p50_step_time_ms'] or 0:8.1f} ms  {row['status']}")
    print(record.path)


if __name__ == "__main__":
    main()
