#!/usr/bin/env python3
"""Check and measure everything on one GPU, in three phases of together nine minutes.

    python3 benchmarks/gpu.py                       all phases
    python3 benchmarks/gpu.py timings               one phase
    python3 benchmarks/gpu.py gpu_tests train_m     tasks by name
    python3 benchmarks/gpu.py --rehearse            the same commands on a CPU, with tiny models

1. `correctness`: all that needs no quiet GPU, in several processes at once: tests, the sanitizer,
   training on digits, memory, the study of memory, made JPEG files, and Inductor's caches.
2. `timings`: all timings in one process, because cuDNN's search takes 34 s in each process.
3. `training`: `train.py` on the made JPEG files, as a folder and as a data set of `tresnet shard`.

A phase ends at its time limit. Within it, what is most valuable comes first. A task that fails or
hangs does not stop the others. Records, logs and the runs' tables go to `--output-dir`. SIGTERM and
Ctrl-C end the tasks that run, and keep their results. Figures of a rehearsal are meaningless.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from tyro.conf import Positional, arg

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 10  # between the signal to end a task and its end by force
LAST_LINES = 8  # of each log, which are printed at the end
REHEARSAL_FACTOR = 5  # a CPU may be slow


class Task(NamedTuple):
    """Time limit and command line of a process; names in braces stand for values.

    `in_checkout` says whether the command runs in this checkout or in its lane's own directory.
    """

    limit_s: int
    command: str
    in_checkout: bool = False
    environment: str = ""


Lane = dict[str, Task]  # tasks by name, which run one after another


def bench(kind: str, cases: str, batches: str = "{batch}", steps: str = "{steps}") -> str:
    """Return the arguments of `tresnet bench train` or `tresnet bench infer` for `cases`."""
    return (
        f"bench {kind} {cases} --batch-size {batches} --input-size {{size}} --cuda-graph off"
        f" {steps} --device {{device}} --output-dir {{records}}"
    )


def warm(kind: str, cases: str, batches: str = "{batch}") -> Task:
    """Return a task that compiles `cases` and so fills Inductor's cache for the timings."""
    once = "--warmup-steps 1 --rounds 1 --steps 1 --time-limit-s 170 --case-limit-s 165"
    command = bench(kind, cases, batches, once).replace("{records}", "{work}/warm")
    return Task(175, f"{{tresnet}} {command}", in_checkout=True)


# Our models run with impl=triton, which raises an error instead of falling back to plain modules.
# Without layout_opt, torch 2.12 and later may lose channels_last in a compiled backward.
CORRECTNESS: dict[str, Lane] = {
    "tests": {"gpu_tests": Task(175, "{pytest} -v -m gpu -n {processes} {gpu_tests}", True)},
    "sanitizer": {
        "sanitizer": Task(
            175,
            "{sanitizer} {pytest} -p no:xdist --maxfail 3 {kernel_tests}",
            True,
            # Without PyTorch's cache, the sanitizer sees the bounds of each tensor.
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    },
    "digits": {
        "digits": Task(130, "{train} --data digits --recipe digits --runs runs --name d1 {short}"),
        "evaluation": Task(60, "{eval} --data digits --weights runs/d1/best.safetensors"),
        "prediction": Task(60, "{tresnet} predict data/digits/val/7 --weights tresnet_t.digits"),
        "export": Task(90, "{tresnet} export tresnet_t.digits --format {format} --output d.pt2"),
    },
    "runs": {
        "fp16": Task(
            90,
            "{train} --data digits --recipe digits --model {digits_model} --amp {fp16} --epochs 2"
            " --runs runs --name f16",
        ),
        "auto_batch": Task(
            90,
            "{train} --data digits --recipe digits --model {digits_model} --batch-size {auto}"
            " --epochs 1 --runs runs --name auto",
        ),
        "torchrun": Task(
            90,
            "{python} -m torch.distributed.run --nproc-per-node 1 {root}/train.py --data digits"
            " --recipe digits --epochs 2 --runs runs --name ddp",
        ),
    },
    "memory": {
        "memory_accuracy": Task(
            150, "{python} benchmarks/memory_accuracy.py {measured} --output-dir {records}", True
        )
    },
    "study": {
        "memory_study": Task(
            175,
            "{python} benchmarks/memory_study.py {study} --time-limit-s 170 --output-dir {records}",
            True,
        )
    },
    "images": {
        "images": Task(90, "{python} benchmarks/make_jpegs.py {work}/images {counts}", True),
        "shards": Task(90, "{tresnet} shard {work}/images {work}/shards --short-side 256", True),
    },
    # A lane each, because one compilation for training takes up to two minutes.
    "compile_m": {"compile_train_m": warm("train", "{timm_m}@{peer}")},
    "compile_replays": {"compile_train_replays": warm("train", "{timm_m}@{replays}")},
    "compile_small": {
        "compile_train_64": warm("train", "{timm_m}@{peer} {timm_m}@{replays}", "{small}")
    },
    "compile_xl": {"compile_train_xl": warm("train", "{timm_xl}@{peer}", "{half}")},
    "compile_infer": {
        "compile_infer_m": warm("infer", "{timm_m}@{frozen} --dtype {dtype}"),
        "compile_infer_small": warm("infer", "{timm_m}@{fast} --dtype {dtype}", "1 16"),
    },
}
TIMINGS: dict[str, tuple[int, str]] = {
    "train_m": (
        110,
        bench(
            "train",
            "{timm_m} {m}@{triton},{graph} {timm_m}@{peer} {m}@{triton}"
            " {m}@{triton},{graph},recompute=none {timm_m}@{replays}",
        ),
    ),
    "infer_m": (
        80,
        bench(
            "infer",
            "{timm_m} {m}@{triton},{graph} {timm_m}@{frozen} {m}@{triton} --dtype {dtype}",
        ),
    ),
    "infer_m_small": (
        70,
        bench(
            "infer",
            "{timm_m}@{graph} {m}@{triton},{graph} {timm_m}@{fast} --dtype {dtype}",
            "1 16",
        ),
    ),
    "train_m_64": (
        60,
        bench(
            "train",
            "{timm_m} {m}@{triton},{graph} {timm_m}@{peer} {timm_m}@{replays} {m}@{triton}",
            "{small}",
        ),
    ),
    "profile": (
        40,
        "profile {m}@{triton} {timm_m}@{peer} --batch-size {batch} --cuda-graph off"
        " --input-size {size} {traced} --device {device} --output-dir {records}/traces",
    ),
    "train_xl": (90, bench("train", "{timm_xl} {xl}@{triton},{graph} {timm_xl}@{peer}", "{half}")),
    "train_l": (80, bench("train", "{timm_l} {l}@{triton},{graph}", "{half}")),
}
_RUN = (
    "{train} --data {work}/%s --model {m} --batch-size {batch} --epochs 2 --workers {workers}"
    " --recipe paper --runs {work}/runs --name %s {run_options}"
)
TRAINING: dict[str, Lane] = {
    "training": {
        "train_folder": Task(55, _RUN % ("images", "folder")),
        "train_shards": Task(55, _RUN % ("shards", "shards")),
    }
}
LIMITS_S = {"correctness": 180, "timings": 250, "training": 110}

GPU = {
    "peer": "compile=default,layout_opt=true",
    "replays": "compile=reduce-overhead,layout_opt=true",
    "frozen": "compile=default,freeze=true",
    "fast": "compile=reduce-overhead,freeze=true",
    **{"m": "tresnet_m", "l": "tresnet_l", "xl": "tresnet_xl", "digits_model": "tresnet_s"},
    **{f"timm_{name}": f"timm:tresnet_{name}" for name in ("m", "l", "xl")},
    **{"triton": "impl=triton", "graph": "cuda_graph=on"},
    **{"device": "cuda", "size": "224", "small": "64", "half": "128", "batch": "256"},
    **{"steps": "--warmup-steps 3 --rounds 3 --steps 8", "traced": "--warmup-steps 3"},
    **{"dtype": "bf16", "fp16": "fp16", "format": "aoti", "short": ""},
    "auto": "auto --gpu-memory 6GiB",
    "gpu_tests": "tests",
    "kernel_tests": "tests/ops/test_epilogue.py",
    "sanitizer": "compute-sanitizer --tool memcheck --error-exitcode 7 --print-limit 20",
    **{"processes": "3", "workers": "15", "study": "", "counts": "", "run_options": ""},
    "measured": "tresnet_m timm:vgg16_bn timm:vit_small_patch16_224",
}
REHEARSAL = {
    **GPU,
    **dict.fromkeys(("m", "l", "xl", "digits_model"), "tresnet_t"),
    **dict.fromkeys(("timm_m", "timm_l", "timm_xl"), "timm:test_resnet"),
    **{"triton": "impl=plain", "graph": "cuda_graph=auto"},
    **{"device": "cpu", "size": "32", "small": "2", "half": "3", "batch": "2"},
    "steps": "--warmup-steps 1 --rounds 1 --steps 1",
    "traced": "--warmup-steps 1 --steps 1",
    **{"dtype": "fp32", "fp16": "off", "format": "pt2", "short": "--epochs 1", "auto": "64"},
    **{"gpu_tests": "tests/test_env.py", "kernel_tests": "tests/measure/test_throughput.py"},
    **{"processes": "1", "workers": "0", "study": "variable cnn --rehearse"},
    "counts": "--distinct 4 --train 16 --val 8 --classes 2",
    "run_options": "--input-size 32 --device cpu --ema-decay 0",
    "sanitizer": "",
    "measured": "none --device cpu",  # PyTorch counts no memory on a CPU, so nothing is compared
}
PHASES: dict[str, dict[str, Lane]] = {
    "correctness": CORRECTNESS,
    "timings": {"timings": dict.fromkeys(TIMINGS, Task(0, ""))},  # `timing_process` replaces these
    "training": TRAINING,
}
NAMES = (*PHASES, *(name for lanes in PHASES.values() for lane in lanes.values() for name in lane))


@dataclasses.dataclass(frozen=True)
class Options:
    """The tasks to run."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="[PHASE | TASK ...]")] = tuple(PHASES)
    """Phases (correctness, timings, training) or tasks of them; by default all."""
    rehearse: bool = False
    """Run the same commands on the CPU, with tiny models and without torch.compile."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of records and logs."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Values, folders and state that the tasks of a call share."""

    values: dict[str, str]
    output: Path  # of records and logs
    work: Path  # temporary, of runs and images
    factor: int  # of all time limits
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def run_phase(self, phase: str, lanes: dict[str, Lane]) -> list[str]:
        """Run the lanes of a phase at once; return a line for each task that did not succeed."""
        end_s = time.monotonic() + LIMITS_S[phase] * self.factor
        with ThreadPoolExecutor(len(lanes)) as pool:
            running = [
                pool.submit(self._run_lane, name, lane, end_s) for name, lane in lanes.items()
            ]
            try:
                return [failure for lane in running for failure in lane.result()]
            except KeyboardInterrupt:
                self.stop.set()
                return [failure for lane in running for failure in lane.result()]

    def _run_lane(self, name: str, lane: Lane, end_s: float) -> list[str]:
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        failures = []
        for task_name, task in lane.items():
            began_s = time.monotonic()
            limit_s = min(task.limit_s * self.factor, end_s - began_s)
            if self.stop.is_set() or limit_s <= 0:
                failures.append(f"{task_name}: left out")
                continue
            reason = self._run(task_name, task, folder, limit_s)
            print(f"{task_name}: {reason or 'ok'}, {time.monotonic() - began_s:.0f} s", flush=True)
            if reason:
                failures.append(f"{task_name}: {reason}, see {self._log(task_name)}")
        return failures

    def _log(self, name: str) -> Path:
        return self.output / f"gpu_{name}.log"

    def _run(self, name: str, task: Task, folder: Path, limit_s: float) -> str:
        """Run a task; return why it failed, or an empty string."""
        end_s = time.monotonic() + limit_s
        command = shlex.split(task.command.format_map(self.values))
        if shutil.which(command[0]) is None:
            return f"{command[0]} is not installed"
        environment = os.environ | dict.fromkeys(task.environment.split(), "1")
        cwd = ROOT if task.in_checkout else folder
        with self._log(name).open("wb") as file:
            child = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            while child.poll() is None:
                if self.stop.is_set() or time.monotonic() > end_s:
                    os.killpg(child.pid, signal.SIGTERM)  # a benchmark then writes its record
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(GRACE_S)
                    return "interrupted" if self.stop.is_set() else "out of time"
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # children of the command that still run
            child.wait()
        return f"exit status {child.returncode}" if child.returncode else ""

    def timing_process(self, names: Sequence[str]) -> dict[str, Lane]:
        """Return the lane whose only task makes the timings `names` in one process."""
        limit_s = (LIMITS_S["timings"] - GRACE_S) * self.factor
        timings = []
        for name in names:
            own_limit_s, command = TIMINGS[name]
            arguments = shlex.split(command.format_map(self.values))
            timings.append((name, own_limit_s * self.factor, arguments))
        plan = self.work / "timings.json"
        plan.write_text(json.dumps({"limit_s": limit_s, "timings": timings}))
        command = f"{{python}} -m benchmarks.gpu_timings {shlex.quote(str(plan))}"
        return {"timings": {"timings": Task(LIMITS_S["timings"], command, in_checkout=True)}}

    def keep_tables(self) -> None:
        """Copy the tables of the runs in the work folder to the output folder."""
        for path in sorted(self.work.glob("runs/*/log.csv")):
            shutil.copyfile(path, self.output / f"train_jpeg_{path.parent.name}.csv")


def chosen(names: Sequence[str]) -> dict[str, dict[str, Lane]]:
    """Return the phases with those lanes and tasks that `names` contain, by phase or by task."""
    phases = {}
    for phase, lanes in PHASES.items():
        kept = {
            lane: {name: task for name, task in tasks.items() if {phase, name} & set(names)}
            for lane, tasks in lanes.items()
        }
        if kept := {lane: tasks for lane, tasks in kept.items() if tasks}:
            phases[phase] = kept
    return phases


def main(options: Options) -> int:
    """Run the tasks; return 1 if any failed or was left out, and 2 if none can start."""
    if unknown := [name for name in options.names if name not in NAMES]:
        print(f"expected names out of {', '.join(NAMES)}, got {unknown[0]}", file=sys.stderr)
        return 2
    if not (options.rehearse or torch.cuda.is_available()):
        print("expected a GPU, but PyTorch sees none: try --rehearse", file=sys.stderr)
        return 2
    output = options.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        values = values_of(options.rehearse, output, Path(work))
        factor = REHEARSAL_FACTOR if options.rehearse else 1
        session = Session(values, output, Path(work), factor)
        for phase, lanes in chosen(options.names).items():
            began_s = time.monotonic()
            print(f"--- {phase}, at most {LIMITS_S[phase] * factor} s: {output}", flush=True)
            if phase == "timings":
                lanes = session.timing_process([*lanes["timings"]])
            failures += session.run_phase(phase, lanes)
            print(f"--- {phase}: {time.monotonic() - began_s:.0f} s", flush=True)
        session.keep_tables()
    for path in sorted(output.glob("gpu_*.log")):
        print(f"##### {path.name}")
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        print("\n".join(line[:200] for line in lines))
    print("\n".join(failures or ["everything was measured"]))
    return int(bool(failures))


def values_of(rehearse: bool, output: Path, work: Path) -> dict[str, str]:
    """Return the values for the names in commands."""
    root, python = shlex.quote(str(ROOT)), shlex.quote(sys.executable)
    return {
        **(REHEARSAL if rehearse else GPU),
        **{"python": python, "root": root, "records": shlex.quote(str(output))},
        "work": shlex.quote(str(work)),
        "pytest": f"{python} -m pytest -q --tb=short -rfE -p no:benchmark -p no:cacheprovider",
        "tresnet": f"{python} -m tresnet.cli.main",
        "train": f"{python} {root}/train.py",
        "eval": f"{python} {root}/eval.py",
    }


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
