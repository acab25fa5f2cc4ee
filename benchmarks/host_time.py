#!/usr/bin/env python3
"""Measure a training step's CPU time in Python, PyTorch's dispatcher and Triton's launcher.

    python3 benchmarks/host_time.py timm:tresnet_m tresnet_m

Steps of `tresnet.steps` run on one CPU thread, with so few channels and pixels that operators
compute next to nothing. Convolutions pass through PyTorch's dispatcher and autograd, but only
allocate outputs (convolution_stand_in.cpp, which needs a C++ compiler). Launches of Triton kernels
run the launcher's Python code, but call no CUDA driver, so the results are meaningless.
Rounds of the models alternate, and the clock is this process's CPU time. The record goes to
benchmarks/records. `--profile` prints the functions of the last model's steps instead.
`--instructions` counts instructions under valgrind; other work on the machine does not change them.
"""

import cProfile
import dataclasses
import functools
import gc
import itertools
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set

import numpy as np
import torch
import tyro
from torch.nn.functional import cross_entropy
from torch.utils.cpp_extension import load
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tyro.conf import Positional, arg

from tresnet.cli import shell
from tresnet.cli.output import finish, format_table, progress, say
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, run
from tresnet.measure.settings import StepSettings
from tresnet.ops import dispatch
from tresnet.peers import build_named, split_name
from tresnet.settings import Compute, Step
from tresnet.steps import StepHost, TrainingStep

WIDTH_FACTOR, BATCH_SIZE, SIDE = 0.125, 2, 32
PERCENTILES = (20, 50, 80)
COLUMNS = [f"p{percentile}_step_time_us" for percentile in PERCENTILES]
# Attributes of Triton 3.6 to 3.9's launcher, for a kernel without scratch memory.
LAUNCHER: dict[str, Any] = {
    **dict.fromkeys(("num_ctas", "global_scratch_align", "profile_scratch_align"), 1),
    **dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0),
    **dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "gsan_enabled"), False),
    **dict.fromkeys(("arg_annotations", "kernel_signature")),
}
CPU = torch.device("cpu")
launches = itertools.count()


class NoDriver:
    """Stand-in for Triton's driver, which describes an H100."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: -1)  # `get_device()` of CPU tensors
    get_current_stream = staticmethod(lambda device: 0)


def compiled(self: JITFunction, key: Any, signature: Any, device: int, *_: Any) -> CompiledKernel:
    """Return a kernel whose launch only counts itself, in place of Triton's compiled kernel."""
    launcher = object.__new__(CudaLauncher)
    vars(launcher).update(LAUNCHER, launch=lambda *args: next(launches))
    kernel = object.__new__(CompiledKernel)
    kernel.module = kernel.function = kernel._module_pid = 0  # so that Triton loads no module
    kernel._run = launcher
    kernel.name = kernel.src = kernel.packed_metadata = None
    return self.device_caches[device][0].setdefault(key, kernel)


@dataclasses.dataclass(frozen=True)
class Options(StepSettings):
    """Models and precisions to time."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = (
        "timm:tresnet_m",
        "tresnet_m",
    )
    """Models: names of `tresnet list`, or timm:NAME."""
    amp: tuple[str, ...] = ("bf16", "off")
    """Precisions. Models are compared within each precision."""
    profile: bool = False
    """Print the functions in which the last model's steps spend their time, and record nothing."""
    instructions: bool = False
    """Count the instructions of a step under valgrind's callgrind instead of timing it."""
    skip_multi_tensor: bool = False
    """Leave out multi-tensor operations, which a CPU, unlike a GPU, runs as loops of operators."""
    under_valgrind: bool = False
    """Used by --instructions in its own child processes."""


class Host(Contender):
    """A model whose training steps are timed."""

    def __init__(self, model: str, amp: str, settings: Options) -> None:
        """Store the settings."""
        self.label, self.compared_with, self._settings = f"{model}, amp {amp}", amp, settings
        self.columns: dict[str, Any] = {"model": model, "amp": amp, "triton_launches": None}
        self._numbers = itertools.count(1)

    def set_up(self) -> None:
        """Build the model and run the warm-up steps."""
        name, amp = self.columns["model"], self.columns["amp"]
        ours = split_name(name)[0] == "tresnet"
        model = build_named(name, width_factor=WIDTH_FACTOR, impl="triton" if ours else None)
        sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, fused=True)
        host = StepHost(device=CPU, build_optimizer=sgd)
        self._step = TrainingStep(model, Step(compute=Compute(amp=amp)), host)
        self._images = self._step.feed.images(torch.rand(BATCH_SIZE, 3, SIDE, SIDE))
        self._labels = torch.zeros(BATCH_SIZE, dtype=torch.long)
        for _ in range(self._settings.warmup_steps):
            before = next(launches)
            self.step()
        self.columns["triton_launches"] = next(launches) - before - 1

    def step(self) -> None:
        """Run forward, backward and the optimizer step."""
        self._step.backward(self._images, self._labels, cross_entropy)
        self._step.optimizer_step(next(self._numbers))

    def visit(self) -> Sequence[float]:
        """Return the seconds of CPU time of each step."""
        marks = [time.process_time()]
        for _ in range(self._settings.steps):
            self.step()
            marks.append(time.process_time())
        return [end - begin for begin, end in itertools.pairwise(marks)]

    def figures(self, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return percentiles of microseconds per step."""
        times = [time_s for visit in rounds for time_s in visit]
        percentiles = [float(p) * 1e6 for p in np.percentile(times, PERCENTILES)] if times else []
        return dict(itertools.zip_longest(COLUMNS, percentiles))


def run_under_valgrind(host: Host, steps: int) -> None:
    """Set up the model, then run `steps` steps while callgrind counts instructions."""
    host.set_up()
    gc.collect()
    gc.disable()
    control = ["callgrind_control", str(os.getpid()), "-i"]
    subprocess.run([*control, "on"], check=True, stdout=subprocess.DEVNULL)
    for _ in range(steps):
        host.step()
    subprocess.run([*control, "off"], check=True, stdout=subprocess.DEVNULL)


def count_instructions(model: str, amp: str, steps: int, skip: bool) -> float:
    """Return the number of instructions of a step, which callgrind counts in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no",
            f"--callgrind-out-file={folder}/out", sys.executable, __file__, model, "--amp", amp,
            "--steps", str(steps), "--warmup-steps", "5", "--under-valgrind",
            *(["--skip-multi-tensor"] if skip else []),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        totals = re.findall(r"^(?:totals|summary): (\d+)", Path(folder, "out").read_text(), re.M)
    return max(map(int, totals)) / steps


def instruction_table(options: Options) -> int:
    """Print and record each model's instructions per step, and the ratio to the first model's."""
    rows: list[dict[str, Any]] = []
    for amp in options.amp:
        counts = [
            count_instructions(model, amp, options.steps, options.skip_multi_tensor)
            for model in options.models
        ]
        rows += [
            {"model": model, "amp": amp, "instructions": count, "ratio": count / counts[0]}
            for model, count in zip(options.models, counts, strict=True)
        ]
    record = RecordFile(
        options.output_dir, "host_instructions", device=CPU, settings=options.to_dict()
    )
    cells = [
        [row["model"], row["amp"], f"{row['instructions']:,.0f}", f"{row['ratio']:.3f}"]
        for row in rows
    ]
    say(format_table(list(rows[0]), cells))
    say(f"record: {record.write(rows)}")
    return 0


def main(options: Options, argv: Sequence[str]) -> int:
    """Time the models, count their instructions, or profile the last model."""
    options.check()
    if options.instructions:
        return instruction_table(options)
    dispatch.interpreted = lambda: True  # so that the kernels accept CPU tensors
    source = Path(__file__).with_name("convolution_stand_in.cpp")
    load(source.stem, [str(source)], is_python_module=False)
    if options.skip_multi_tensor:
        for name in ("_foreach_copy_", "_foreach_lerp_", "_foreach_add_"):
            setattr(torch, name, lambda *args: None)
    JITFunction._do_compile = compiled  # pyright: ignore[reportAttributeAccessIssue]
    driver.set_active(NoDriver())  # pyright: ignore[reportArgumentType]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    hosts = [Host(model, amp, options) for amp in options.amp for model in options.models]
    if options.under_valgrind:
        run_under_valgrind(hosts[0], options.steps)
        return 0
    if options.profile:
        hosts[-1].set_up()
        with cProfile.Profile() as profiled, torch.autograd.set_multithreading_enabled(False):
            hosts[-1].visit()
        pstats.Stats(profiled).sort_stats("tottime").print_stats(45)
        return 0
    settings = {
        **options.to_dict(),
        "width_factor": WIDTH_FACTOR,
        "input": [BATCH_SIZE, 3, SIDE, SIDE],
        "method": "steps of tresnet.steps on a CPU, on which operators compute next to nothing; the"
        " driver's calls are left out",
    }
    record = RecordFile(
        options.output_dir,
        "host_time",
        device=CPU,
        settings=settings,
        warmup_steps=options.warmup_steps,
        runs=options.rounds * options.steps,
        argv=argv,
    )
    outcome = run([hosts], options, rounds=options.rounds, log=progress, record=record)
    columns = ["triton_launches", *COLUMNS]
    rows = [
        [row["model"], row["amp"], *(f"{row[c] or 0:,.0f}" for c in columns)]
        for row in outcome.rows
    ]
    say(format_table(["model", "amp", *columns], rows))
    return finish(outcome)


if __name__ == "__main__":
    arguments = ["host_time.py", *sys.argv[1:]]
    sys.exit(shell.run(lambda: main(tyro.cli(Options, description=__doc__), arguments)))
