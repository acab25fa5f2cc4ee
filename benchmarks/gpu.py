#!/usr/bin/env python3
"""Check and measure everything on one GPU, what is worth most first, until the time is spent.

    python3 benchmarks/gpu.py                    all commands of `COMMANDS`, in nine minutes
    python3 benchmarks/gpu.py train_m infer_m    commands by name
    python3 benchmarks/gpu.py --rehearse         the same commands on a CPU, with tiny models

Commands run one after another, because a timing beside other processes says nothing. Each is a fork
of this process, which has imported PyTorch but not touched the GPU: so no command waits for
imports, and an error on the GPU ends one command. A benchmark that such an error ends starts again
with the cases that are left. Logs, records and tables of runs go to `--output-dir` as they arise.
SIGTERM and Ctrl-C end the command that runs, which keeps its results. Figures of a rehearsal are
meaningless.
"""

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

# A line is a name, a limit in seconds and words, which begin with a command of `values_of`. Words
# in braces are values. A benchmark's cases follow " : ", and the first is the base of its ratios.
# Our models are timed with impl=triton, because a fallback would be timed as if it were kernels.
COMMANDS = """
first_use      40 {gpu_tests} -rP tests/fused/test_first_use.py tests/models/test_tresnet.py
graphs         40 {gpu_tests} tests/steps/test_graph.py tests/steps/test_inference.py
evaluation     60 {gpu_tests} tests/engine/test_batch_size.py tests/engine/test_set_up.py
feed           40 {gpu_tests} tests/steps/test_feed.py tests/data/test_loaders.py
memcheck      100 {gpu_tests} -k memcheck tests/benchmarks/test_on_gpu.py
racecheck     100 {gpu_tests} -k racecheck tests/benchmarks/test_on_gpu.py
render         40 {gpu_tests} tests/ops/test_render.py
alone         110 {gpu_tests} -k times -rP tests/benchmarks/test_on_gpu.py
jpeg          170 {gpu_tests} -k jpeg -rP tests/benchmarks/test_on_gpu.py
train_m       110 {bench_train} --batch-size {batch} : {timm_m} {m}@{graph} {m}@{ours} {m}@{none}
infer_m        80 {bench_infer} --batch-size {batch} {dtype} : {timm_m} {m}@{graph} {m}@{ours}
infer_m_1      30 {bench_infer} --batch-size 1 {dtype} : {timm_m}@cuda_graph={on} {m}@{graph}
train_m_small  60 {bench_train} --batch-size {small} : {timm_m} {m}@{graph} {m}@{ours}
profile        75 {script}/profile_step.py {m}@{ours} --batch-size {batch} {traced}
ops            40 {script}/ops.py {operations} --batch-size {batch} {where} --time-limit-s 30
train_m_peer  240 {bench_train} --batch-size {batch} : {m}@{graph} {timm_m}@{peer} {timm_m}@{fast}
infer_m_peer  120 {bench_infer} --batch-size {batch} {dtype} : {m}@{graph} {timm_m}@{frozen}
infer_m_1_peer 90 {bench_infer} --batch-size 1 {dtype} : {m}@{graph} {timm_m}@{fast_frozen}
infer_m_16    120 {bench_infer} --batch-size 16 {dtype} : {m}@{graph} {timm_m}@{fast_frozen}
cudnn_fused    60 {script}/cudnn_fused.py {convolutions} {where} --time-limit-s 50
train_xl      200 {bench_train} --batch-size {half} : {timm_xl} {xl}@{graph} {timm_xl}@{peer}
train_l        80 {bench_train} --batch-size {half} : {timm_l} {l}@{graph}
gpu_tests     170 {gpu_tests} {others}
large_maps     40 {gpu_tests} tests/ops/test_large_maps.py
digits        130 {train} digits --data digits --recipe digits {one_epoch}
fp16           60 {train} fp16 --data digits --recipe digits --model {s} {fp16} {first_epoch}
auto_batch     60 {train} auto --data digits --recipe digits --model {s} {auto} {first_epoch}
torchrun       60 {torchrun} ddp --data digits --recipe digits {first_epoch}
export         90 {tresnet} export tresnet_t.digits --output {work}/digits.pt2 --format {format}
memory        150 {script}/memory_accuracy.py {measured}
memory_study  120 {tresnet} memory measure {study} --time-limit-s 110 --output-dir {output}
more_images    60 {script}/make_jpegs.py {work}/more {images}
train_folder  110 {train} folder --data {work}/more --batch-size {batch} --epochs 2 {paper}
shards         60 {tresnet} shard {work}/more {work}/shards --short-side 256
train_shards  110 {train} shards --data {work}/shards --batch-size {batch} --epochs 2 {paper}
"""
NAMES = [line.split()[0] for line in COMMANDS.strip().splitlines()]
GPU = {
    **{name: f"tresnet_{name}" for name in ("s", "m", "l", "xl")},
    **{f"timm_{name}": f"timm:tresnet_{name}" for name in ("m", "l", "xl")},
    **{"on": "on", "ours": "impl=triton", "graph": "impl=triton,cuda_graph=on"},
    "none": "impl=triton,cuda_graph=on,recompute=none",
    # Without layout_opt, torch 2.12 and later may lose channels_last in a compiled backward.
    "peer": "compile=default,layout_opt=true",
    "fast": "compile=reduce-overhead,layout_opt=true",
    "frozen": "compile=default,freeze=true",
    "fast_frozen": "compile=reduce-overhead,freeze=true",
    **{"device": "cuda", "size": "224", "small": "64", "half": "128", "batch": "256"},
    **{"dtype": "--dtype bf16", "fp16": "--amp fp16", "format": "aoti", "one_epoch": ""},
    "first_epoch": "--epochs 1",
    **{"steps": "--warmup-steps 3 --rounds 3 --steps 8", "traced_steps": "--warmup-steps 3"},
    **{"auto": "--batch-size auto --gpu-memory 6GiB", "images": ""},
    **{"operations": "", "convolutions": ""},
    "study": "torchvision:vgg16_bn torchvision:resnet50 torchvision:vit_b_16 --batch-size 128"
    " --amp off --no-channels-last --cuda-graph off --momentum 0 --device cuda",
    "run": "--workers 15",
    "measured": "tresnet_m timm:vgg16_bn timm:vit_small_patch16_224",
}
REHEARSAL = {
    **GPU,
    **dict.fromkeys(("s", "m", "l", "xl"), "tresnet_t"),
    **dict.fromkeys(("timm_m", "timm_l", "timm_xl"), "timm:test_resnet"),
    **{"on": "auto", "ours": "impl=plain", "graph": "impl=plain", "none": "recompute=none"},
    **{"device": "cpu", "size": "32", "small": "2", "half": "3", "batch": "2"},
    **{"dtype": "--dtype fp32", "fp16": "--amp off", "format": "pt2"},
    **dict.fromkeys(("one_epoch", "first_epoch"), "--epochs 1 --width-factor 0.25"),
    "steps": "--warmup-steps 1 --rounds 1 --steps 1",
    "traced_steps": "--warmup-steps 1 --steps 1",
    "study": "torchvision:squeezenet1_1 --batch-size 2 --amp off --device cpu",
    "images": "--distinct 4 --train 16 --val 8 --classes 2",
    **{"auto": "--batch-size 64", "run": "--workers 0 --input-size 32 --device cpu --ema-decay 0"},
    "operations": "abn_se --rounds 1",
    "convolutions": "--batch-sizes 1 --dtypes fp16 --rounds 1",
    "measured": "none --device cpu",  # PyTorch counts no memory on a CPU, so nothing is compared
}
ALONE = {"test_large_maps", "test_on_gpu"}  # tests that have lines of their own
ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 10  # between the signal to end a command and its end by force
LEAST_S = 5  # in less time, no command gives anything
LAST_LINES = 8  # of the log of a command that failed
IMPORTED = "pytest tresnet.cli.train_eval tresnet.cli.bench tresnet.engine.train timm.optim"
SIGNALS = {  # with what commands do at them
    **{signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL},
    signal.SIGINT: signal.default_int_handler,
}
FORK = multiprocessing.get_context("fork")
# Errors after which a process can use the GPU no more, as CUDA, cuDNN and Triton word them.
STICKY = re.compile(r"CUDA error|CUDNN_STATUS|CUBLAS_STATUS|Triton Error \[CUDA\]")


def values_of(rehearse: bool, output: Path, work: Path) -> dict[str, str]:
    """Return the values for the words in braces; commands that begin with `python` are forks."""
    values = REHEARSAL if rehearse else GPU
    root, out, runs = (shlex.quote(str(path)) for path in (ROOT, output, work / "runs"))
    pytest = "python -m pytest -v --tb=short -p no:cacheprovider -p no:xdist --maxfail 5"
    pytest += " -W ignore::pytest.PytestAssertRewriteWarning"  # a plugin is imported before
    bench, steps = "python -m tresnet.cli.main bench", values["steps"]
    where = f"--input-size {values['size']} --device {values['device']} --output-dir {out}"
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    others = sorted(str(path) for path in files if path.stem not in ALONE)
    return {
        **values,
        **{"output": out, "work": shlex.quote(str(work)), "others": shlex.join(others)},
        **{"script": f"python {root}/benchmarks", "tresnet": "python -m tresnet.cli.main"},
        "train": f"python {root}/train.py --runs {runs} --name",
        "torchrun": "python -m torch.distributed.run --nproc-per-node 1"
        f" {root}/train.py --runs {runs} --name",
        "paper": f"--recipe paper --model {values['m']} {values['run']}",
        **{
            f"bench_{k}": f"{bench} {k} --cuda-graph off {steps} {where}"
            for k in ("train", "infer")
        },
        "where": where,
        "traced": f"--cuda-graph off {values['traced_steps']} {where}/traces",
        "measured": f"{values['measured']} --output-dir {out}",
        "gpu_tests": f"{pytest} -m gpu",
    }


@dataclasses.dataclass(frozen=True)
class Options:
    """The commands to run."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="[COMMAND ...]")] = tuple(NAMES)
    """Names of commands; by default all."""
    budget_s: float = 540
    """Time for all commands together. Commands for which no time is left are named at the end."""
    rehearse: bool = False
    """Run the same commands on the CPU, with tiny models and without torch.compile."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of records and logs."""


def in_child(words: Sequence[str], log: Path) -> None:
    """Run a command in this process, a new fork, with its output in a file."""
    os.setsid()  # a signal to the group then reaches the command's own children
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    os.chdir(ROOT)
    if words[0] != "python":
        os.execvp(words[0], [sys.executable if word == "python" else word for word in words])
    warnings.resetwarnings()
    is_module = words[1] == "-m"
    sys.argv = list(words[2 if is_module else 1 :])
    run = runpy.run_module if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")


def run_words(words: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command; return why it did not succeed, or an empty string."""
    child, reason = FORK.Process(target=in_child, args=(words, log)), "out of time"
    child.start()
    try:
        child.join(limit_s)
    except KeyboardInterrupt:
        reason = "interrupted"
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if child.exitcode is not None:
        reason = f"exit status {child.exitcode}" if child.exitcode else ""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):  # no child of the command is left
            os.killpg(child.pid, number)
        child.join(wait_s)
    return reason


def left_over(cases: Sequence[str], record: Mapping[str, Any]) -> list[str]:
    """Return the cases that an error on the GPU took along, without that in which it arose."""
    return [
        case
        for case, row in zip(cases, record["rows"], strict=True)
        if row["status"] in ("begun", "not_begun") or STICKY.search(row["error"] or "")
    ][1:]


def run_line(line: str, values: Mapping[str, str], output: Path, end_s: float) -> str:
    """Run a line of `COMMANDS`; return why it did not succeed, or an empty string."""
    name, limit, template = line.split(maxsplit=2)
    words, _, cases = map(shlex.split, template.format_map(values).partition(" : "))
    log, reasons = output / f"gpu_{name}.log", []
    log.unlink(missing_ok=True)
    while True:
        limit_s, before = min(int(limit), end_s - time.monotonic()), {*output.glob("*.json")}
        own = ["--time-limit-s", f"{limit_s:.0f}", "--case-limit-s", f"{limit_s * 3 / 4:.0f}"]
        reason = run_words([*words, *(own if cases else []), *cases], log, limit_s + GRACE_S)
        reasons += [reason] * bool(reason)
        records = sorted({*output.glob("*.json")} - before)
        broken = bool(cases and records and reason.startswith("exit status"))
        cases = left_over(cases, json.loads(records[0].read_text("utf-8"))) if broken else []
        if not cases or end_s - time.monotonic() < LEAST_S:
            return ", ".join(reasons)


def run_all(
    names: Sequence[str], values: Mapping[str, str], output: Path, work: Path, budget_s: float
) -> list[str]:
    """Run commands in the list's order; return a line for each that did not succeed."""
    end_s, failures, reason = time.monotonic() + budget_s, [], ""
    for line in COMMANDS.strip().splitlines():
        name, began_s = line.split()[0], time.monotonic()
        if name not in names:
            continue
        if reason.endswith("interrupted") or end_s - began_s < LEAST_S:
            failures.append(f"{name}: left out")
            continue
        reason = run_line(line, values, output, end_s)
        print(f"{name}: {reason or 'ok'}, {time.monotonic() - began_s:.0f} s", flush=True)
        for table in work.glob("runs/*/log.csv"):
            shutil.copyfile(table, output / f"gpu_run_{table.parent.name}.csv")
        if reason:
            failures.append(f"{name}: {reason}")
            lines = (output / f"gpu_{name}.log").read_text("utf-8", "replace").splitlines()
            print(*(f"  {text[:200]}" for text in lines[-LAST_LINES:]), sep="\n", flush=True)
    return failures


def sees_gpu() -> None:
    """End this process, a fork, with exit code 0 if PyTorch sees a GPU."""
    import torch

    sys.exit(not torch.cuda.is_available())


def main(options: Options) -> int:
    """Run the commands; return 1 if any failed or was left out, and 2 if none can start."""
    if unknown := [name for name in options.names if name not in NAMES]:
        print(f"expected names out of {', '.join(NAMES)}, got {unknown[0]}", file=sys.stderr)
        return 2
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT))
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # of threads that only wait
    for name in IMPORTED.split():
        importlib.import_module(name)
    asked = FORK.Process(target=sees_gpu)  # in this process, the question would begin to use CUDA
    asked.start()
    asked.join()
    if asked.exitcode and not options.rehearse:
        print("expected a GPU, but PyTorch sees none: try --rehearse", file=sys.stderr)
        return 2
    output = options.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as work:
        values = values_of(options.rehearse, output, Path(work))
        print(f"at most {options.budget_s:.0f} s, logs and records in {output}", flush=True)
        failures = run_all(options.names, values, output, Path(work), options.budget_s)
    print("\n".join(failures or ["everything was measured"]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
