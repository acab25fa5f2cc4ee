#!/usr/bin/env python3
"""Measure training, inference and kernels on a GPU, in four parts of at most nine minutes each.

    python3 benchmarks/gpu.py 1 2 3 4
    python3 benchmarks/gpu.py train_m               comparisons by name
    python3 benchmarks/gpu.py --rehearse 1 2 3 4    the same commands on a CPU, with tiny models

Each part is a list of comparisons, the most valuable first. A comparison is one process with a time
limit. It measures its cases in alternation, and writes its record after each case. Its output goes
to a log beside the records. A comparison that fails or hangs does not stop the later comparisons.
SIGTERM and Ctrl-C end the current comparison, whose results are kept. Figures of a rehearsal are
meaningless.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from tyro.conf import Positional, arg

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 15  # between a benchmark's own time limit and the end of its process


class Comparison(NamedTuple):
    """Time limit and arguments of a Python process; names in braces stand for values."""

    limit_s: int
    command: str

    def arguments(self, values: dict[str, str], limit_s: int) -> list[str]:
        """Return the arguments with `values` for the names, and time limits below `limit_s`."""
        own = {"limit_s": str(limit_s - GRACE_S), "case_limit_s": str(limit_s // 2)}
        return shlex.split(self.command.format_map({**values, **own}))


def bench(kind: str, cases: str, limit_s: int, batches: str = "{batch}") -> Comparison:
    """Return a comparison of `cases` by `tresnet bench train` or `tresnet bench infer`."""
    return Comparison(
        limit_s,
        f"-m tresnet.cli.main bench {kind} {cases} --batch-size {batches} --input-size {{size}}"
        " --cuda-graph off {steps} --device {device} --output-dir {records}"
        " --time-limit-s {limit_s} --case-limit-s {case_limit_s}",
    )


# Our models run with impl=triton, which raises an error instead of falling back to plain modules.
# Without layout_opt, torch 2.12 and later may lose channels_last in a compiled backward. The limits
# are for empty caches of compiled kernels: on an H100 the first set-up of a model took 29 to 56 s
# (`warmup_s` in its records), and torch.compile takes longer.
PARTS: dict[str, dict[str, Comparison]] = {
    "1": {
        "train_m": bench(
            "train",
            "{timm_m} {m}@{triton},{graph} {m}@{triton} {m}@{triton},{graph},recompute=none"
            " {timm_m}@{graph} {resnet} {timm_m}@batch_size={half}"
            " {m}@{triton},{graph},batch_size={half}",
            240,
        ),
        "profile": Comparison(
            110,
            "benchmarks/profile_step.py {timm_m} {m}@{triton} --batch-size {batch} --cuda-graph off"
            " --input-size {size} {traced} --device {device}"
            " --output-dir {records}/traces",
        ),
        "graphs": Comparison(110, "{pytest} -m gpu tests/steps"),
    },
    "2": {
        "compiled_m": bench(
            "train",
            "{timm_m}@{peer} {m}@{plain},compile=default {m}@{plain},compile=default,{graph}"
            " {timm_m}@compile=reduce-overhead,layout_opt=true",
            540,
        ),
    },
    "3": {
        "infer_m": bench(
            "infer",
            "{timm_m}@{compiled} {m}@{triton},{graph} {m}@{plain},{compiled} --dtype {dtype}",
            *(230, "{batch} 1 16"),
        ),
        "train_xl": bench("train", "{timm_xl} {xl}@{triton},{graph}", 140, "{half}"),
        "memory": bench(
            "train",
            "{timm_m} {m}@{triton} {m}@{triton},grad_checkpointing=true",
            80,
            "{half} {double}",
        ),
        "largest_batch": Comparison(
            90,
            "-m tresnet.cli.main bench max-batch {timm_m} {m}@{triton}"
            " {m}@{triton},grad_checkpointing=true --input-size {size}"
            " --cuda-graph off"
            " {largest} --device {device} --output-dir {records}"
            " --time-limit-s {limit_s}",
        ),
    },
    "4": {
        "kernels": Comparison(150, "{pytest} -n {workers} --maxfail 10 {kernel_tests}"),
        "operations": Comparison(
            80,
            "benchmarks/ops.py --batch-size {half}"
            " --input-size {size} --dtype {dtype} --rounds {rounds} --device {device}"
            " --output-dir {records} --time-limit-s {limit_s}",
        ),
        "train_l": bench("train", "{timm_l} {l}@{triton},{graph} {timm_l}@{peer}", 200, "{half}"),
        "max_autotune": bench("infer", "{timm_m}@{tuned} {m}@{plain},{tuned} --dtype {dtype}", 110),
    },
}
GPU = {
    "peer": "compile=default,layout_opt=true",
    "compiled": "compile=default,freeze=true",
    "tuned": "compile=max-autotune,freeze=true",
    **{"m": "tresnet_m", "l": "tresnet_l", "xl": "tresnet_xl", "resnet": "torchvision:resnet50"},
    **{f"timm_{name}": f"timm:tresnet_{name}" for name in ("m", "l", "xl")},
    **{"triton": "impl=triton", "plain": "impl=plain", "graph": "cuda_graph=on"},
    **{"device": "cuda", "size": "224", "half": "128", "batch": "256", "double": "512"},
    **{"steps": "--warmup-steps 3 --rounds 4 --steps 5", "traced": ""},
    **{"dtype": "bf16", "rounds": "20", "workers": "12"},
    "largest": "--first 64 --granularity 16 --gpu-memory 79GiB",
    "pytest": "-m pytest -q --tb=short -rfE -p no:benchmark",
    "kernel_tests": "tests/ops/test_abn_kernels.py tests/fused",
}
REHEARSAL = {
    **GPU,
    **{**dict.fromkeys(("m", "l", "xl"), "tresnet_t"), "resnet": "torchvision:squeezenet1_1"},
    **dict.fromkeys(("timm_m", "timm_l", "timm_xl"), "timm:test_resnet"),
    **{"triton": "impl=plain", "graph": "cuda_graph=auto"},
    **{"device": "cpu", "size": "32", "half": "3", "batch": "2", "double": "4"},
    "steps": "--warmup-steps 1 --rounds 1 --steps 1",
    "traced": "--warmup-steps 1 --steps 1",
    **{"dtype": "fp32", "rounds": "1"},
    "largest": "--first 2 --granularity 2 --at-most 4",
    **{"workers": "1", "kernel_tests": "tests/measure/test_throughput.py"},
}
NAMES = (*PARTS, *(name for part in PARTS.values() for name in part))


@dataclasses.dataclass(frozen=True)
class Options:
    """The comparisons to measure."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="[1 2 3 4 | NAME ...]")] = tuple(
        PARTS
    )
    """Numbers of parts, or names of comparisons; by default all parts."""
    rehearse: bool = False
    """Run the same commands on the CPU, with tiny models and without torch.compile."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of records and logs."""


def run(command: list[str], limit_s: float, log: Path) -> int | None:
    """Run a command; return its exit status, or None if it was ended at the time limit."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return child.wait(limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            os.killpg(child.pid, signal.SIGTERM)  # a benchmark then writes its record
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            if isinstance(end, KeyboardInterrupt):
                raise
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # children of the command that still run
            child.wait()


def main(options: Options) -> int:
    """Run the comparisons; return 1 if any failed or was left out, and 2 if none can start."""
    if unknown := [name for name in options.names if name not in NAMES]:
        print(f"expected names out of {', '.join(NAMES)}, got {unknown[0]}", file=sys.stderr)
        return 2
    if not (options.rehearse or torch.cuda.is_available()):
        print("expected a GPU, but PyTorch sees none: try --rehearse", file=sys.stderr)
        return 2
    comparisons = {name: value for part in PARTS.values() for name, value in part.items()}
    chosen = [name for part in options.names for name in PARTS.get(part, [part])]
    folder = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    values = {**(REHEARSAL if options.rehearse else GPU), "records": shlex.quote(str(folder))}
    if options.rehearse:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    failures: list[str] = []
    for index, name in enumerate(chosen):
        limit_s = comparisons[name].limit_s * (5 if options.rehearse else 1)  # a CPU may be slow
        arguments = comparisons[name].arguments(values, limit_s)
        log, began_s = folder / f"gpu_{name}.log", time.monotonic()
        print(f"--- {name}, at most {limit_s} s: {log}", flush=True)
        try:
            status = run([sys.executable, *arguments], limit_s, log)
        except KeyboardInterrupt:
            failures += [f"{name}: interrupted", *(f"{n}: left out" for n in chosen[index + 1 :])]
            break
        if status != 0:
            reason = "out of time" if status is None else f"exit status {status}"
            failures.append(f"{name}: {reason}, see {log}")
        print(f"{time.monotonic() - began_s:.0f} s", flush=True)
    print("\n".join(failures or ["everything was measured"]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
