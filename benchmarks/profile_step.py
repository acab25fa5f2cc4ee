#!/usr/bin/env python3
"""Profile training steps in about a minute; print a table and write a trace for each case.

    python3 benchmarks/profile_step.py timm:tresnet_m tresnet_m@impl=triton --batch-size 256 \
        --channels-last

Cases are written as for `tresnet bench train`. The table divides the device's time into
convolutions (by shape and layout), matrix products, this package's Triton kernels, Inductor's
kernels, copies, other small kernels (by operator), and gaps, in which the device waits. On a CPU,
PyTorch's operators stand for kernels. https://ui.perfetto.dev opens the traces.
"""

import collections
import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from tresnet import devices
from tresnet.cli import shell
from tresnet.cli.output import format_table, progress, say
from tresnet.measure.cases import BenchCase, Models, parse_case
from tresnet.measure.contenders import inductor_options, prepare
from tresnet.measure.runner import cudnn_benchmark

Event = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COPIES = re.compile(r"gpu_mem|memcpy|memset|aten::(copy_|_to_copy|to|clone|contiguous)$")
PRODUCTS = re.compile(r"aten::(addmm|mm|bmm|linear|matmul|_addmm)")


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclasses.dataclass(frozen=True)
class Options:
    """Cases to profile."""

    models: Models
    case: BenchCase = dataclasses.field(default_factory=BenchCase)
    batch_size: int = 64
    """Number of images in a step."""
    warmup_steps: int = 5
    """Number of steps before the recorded steps; they include compilation."""
    steps: int = 3
    """Number of recorded steps."""
    most_lines: int = 25
    """Number of lines with details in the table; one more line sums the remaining details."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto. auto: a GPU if there is one, else the CPU."""
    output_dir: Path = Path("benchmarks/traces")
    """Directory of the traces."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel, an operator or a gap: its class, a detail of it, and its time."""

    kind: str
    detail: str
    microseconds: float


def our_kernels() -> frozenset[str]:
    """Return the names of this package's Triton kernels, read from the source files."""
    names: set[str] = set()
    for path in (ROOT / "tresnet" / "ops").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"^@(?:kernel|triton\.jit)\b.*\ndef (\w+)", text, re.MULTILINE))
    return frozenset(names)


def read_work(events: Sequence[Event], ours: frozenset[str]) -> list[Work]:
    """Return the kernels in a trace's events, or the operators if the trace has no kernels."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and "dur" in event]
    kernels = [event for event in events if event.get("cat") in DEVICE_WORK]
    if not kernels:
        return [_work(op["name"], op, time, ours) for op, time in _own_times(operators) if time > 0]
    by_id = {op["args"].get("External id"): op for op in operators}
    nothing: Event = {"name": "", "args": {}}
    return [
        _work(
            kernel["name"] if kernel["cat"] == "kernel" else kernel["cat"],
            by_id.get(kernel["args"].get("External id"), nothing),
            kernel["dur"],
            ours,
        )
        for kernel in kernels
    ]


def _work(name: str, operator: Event, microseconds: float, ours: frozenset[str]) -> Work:
    op = operator["name"]
    if "conv" in op.lower() and operator["args"].get("Input Dims"):
        return Work("convolution", _convolution(operator), microseconds)
    if name in ours:
        return Work("our kernels", name, microseconds)
    if name.startswith("triton_"):
        return Work("Inductor's kernels", re.sub(r"_\d+$", "", name)[:60], microseconds)
    if COPIES.match(name) or COPIES.match(op):
        return Work("copies", op or name, microseconds)
    if PRODUCTS.match(op):
        return Work("matrix products", op, microseconds)
    return Work("other small kernels", op or name[:60], microseconds)


def _convolution(operator: Event) -> str:
    """Describe a convolution, for example as `backward 8x64x56x56 * 64x64x3x3, channels_last`."""
    backward = "backward" in operator["name"]
    dims, strides = (operator["args"].get(key, []) for key in ("Input Dims", "Input Strides"))
    first = 1 if backward else 0  # the first input of a backward is the output's gradient
    sizes = " * ".join("x".join(map(str, size)) for size in dims[first : first + 2])
    channel_stride = (strides[first : first + 1] or [[]])[0][1:2]
    layout = ", channels_last" if channel_stride == [1] else ""
    return f"{'backward' if backward else 'forward'} {sizes}{layout}"


def _own_times(operators: Iterable[Event]) -> list[tuple[Event, float]]:
    """Return each operator with its own time, which excludes the operators that it calls."""
    own_times: list[list[Any]] = []
    stacks: dict[Any, list[list[Any]]] = collections.defaultdict(list)  # by thread
    for op in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks[op["tid"]]
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= op["ts"]:
            stack.pop()
        if stack:
            stack[-1][1] -= op["dur"]
        stack.append([op, op["dur"]])
        own_times.append(stack[-1])
    return [(op, time) for op, time in own_times]


def gaps(events: Sequence[Event]) -> float:
    """Return the microseconds between the device's first and last kernel in which it was idle."""
    kernels = [event for event in events if event.get("cat") in DEVICE_WORK]
    busy = kernels or [event for event in events if event.get("cat") == "cpu_op" and "dur" in event]
    idle, until = 0.0, None
    for event in sorted(busy, key=lambda event: event["ts"]):
        if until is not None:
            idle += max(0.0, event["ts"] - until)
        until = max(until or 0.0, event["ts"] + event["dur"])
    return idle


def table(events: Sequence[Event], steps: int, most_lines: int, ours: frozenset[str]) -> str:
    """Return a table of microseconds per step for each class and detail, the largest first."""
    work = read_work(events, ours)
    idle = Work("gaps", "nothing runs", gaps(events))
    total = sum(item.microseconds for item in work) + idle.microseconds
    kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    lines: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for item in (*work, idle):
        for entry in (kinds[item.kind], lines[item.kind, item.detail]):
            entry[0] += item.microseconds
            entry[1] += 1

    def cells(entry: Sequence[float]) -> list[str]:
        time, calls = entry
        return [f"{time / steps:,.0f}", f"{calls / steps:,.0f}", f"{100 * time / total:.1f}"]

    rows = [[kind, "all", *cells(entry)] for kind, entry in _largest_first(kinds)]
    details = [(key, entry) for key, entry in _largest_first(lines)]
    rows += [[kind, detail, *cells(entry)] for (kind, detail), entry in details[:most_lines]]
    rest = details[most_lines:]
    if rest:
        added = [sum(entry[index] for _, entry in rest) for index in (0, 1)]
        rows.append(["the rest", f"{len(rest)} more", *cells(added)])
    return format_table(["class", "what", "us a step", "calls", "%"], rows)


def _largest_first(entries: dict[Any, list[float]]) -> list[tuple[Any, list[float]]]:
    return sorted(entries.items(), key=lambda item: -item[1][0])


def profiled(model: str, options: Options, device: torch.device) -> list[Event]:
    """Profile the steps of one case, write the trace, and return its events."""
    defaults = dataclasses.replace(options.case, batch_size=options.batch_size)
    case = parse_case(model, defaults).checked(True, devices.capability(device))
    say(f"\n{case.label(True)}")
    step = prepare(case, True, device).run
    with inductor_options(case):
        for _ in range(options.warmup_steps):
            step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities, record_shapes=True, acc_events=True) as recorded:
        for _ in range(options.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = options.output_dir / f"{re.sub(r'[^a-z0-9]+', '_', case.label(True).lower())}.json.gz"
    recorded.export_chrome_trace(str(path))
    progress(f"trace: {path}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def main(options: Options) -> int:
    """Profile each case; if one fails, print the error, go on, and return 1 at the end."""
    device, failed, ours = devices.timed_device(options.device), 0, our_kernels()
    with cudnn_benchmark():
        for model in options.models:
            try:
                events = profiled(model, options, device)
                say(table(events, options.steps, options.most_lines, ours))
            except Exception as error:
                failed = 1
                progress(f"{model}: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(shell.run(lambda: main(tyro.cli(Options, description=__doc__))))
