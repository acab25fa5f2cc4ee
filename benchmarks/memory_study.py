#!/usr/bin/env python3
"""Repeat a study of GPU memory on this GPU: its estimates, its measurements, ours and predictions.

    python benchmarks/memory_study.py                          # all six subjects, about 80 s
    python benchmarks/memory_study.py variable vit --rehearse  # on a CPU, with batches of 2

The study is the notebook "GPU memory usage for deep learning image processing" (2023, PyTorch
2.0.1). It trains in fp32 with SGD on batches of 128 random images of 224 pixels, for UNETR 8
volumes. Here each subject runs the study's loop in a new process. Memory is read in the study's
phases (initial, model, train, final), from PyTorch's counters and from NVML. The study kept its
earlier models on the GPU, so `alone` is its measurement less their memory.
UNETR needs MONAI 1.4 or newer and einops.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tresnet import devices
from tresnet.cli import shell
from tresnet.cli.output import format_table
from tresnet.errors import MissingDependencyError
from tresnet.measure.memory_meter import MemoryMeter, to_mib
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, NoResultError, run
from tresnet.measure.settings import RunSettings
from tresnet.memory import predict
from tresnet.memory.allocator import CachingAllocator

STEPS = 3  # from the second step on, every step has the same peak
CLASSES = 10
IMAGES, VOLUMES = (128, 3, 224, 224), (8, 1, 64, 64, 64)


class SmallCNN(nn.Module):
    """3x3 convolution, mean of 2 x 2 pixels, linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(8 * 111 * 111, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.conv(x)).flatten(1))


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(num_classes=CLASSES)


def _unetr() -> nn.Module:
    try:
        from monai.networks.nets.unetr import UNETR
    except ImportError as error:
        raise MissingDependencyError(
            f"UNETR needs MONAI and einops ({error}): pip install monai einops"
        ) from error
    options = {"in_channels": 1, "out_channels": 2, "img_size": (64, 64, 64), "feature_size": 16}
    # MONAI 1.3, as the study had, calls the projection of patches `pos_embed`.
    known = inspect.signature(UNETR).parameters
    options["proj_type" if "proj_type" in known else "pos_embed"] = "perceptron"
    return UNETR(**options)


@dataclasses.dataclass(frozen=True)
class Subject:
    """Subject of the study, with the study's figures in MiB."""

    build: Callable[[], nn.Module] | None  # None for the variable of 1 GiB
    shape: tuple[int, ...]  # of a batch
    target: tuple[int, ...]  # of a sample's target, in floating point
    estimate_mib: float  # by the study's formula
    real_mib: float  # its measured peak
    alone_mib: float  # the same, less what earlier subjects left
    reserved_mib: float


SUBJECTS = {
    "variable": Subject(None, (2**28,), (), 1024, 1024, 1024, 1024),
    "cnn": Subject(SmallCNN, IMAGES, (CLASSES,), 635.8, 530.9, 530.9, 604),
    "vgg16": Subject(
        functools.partial(_torchvision, "vgg16_bn"),
        *(IMAGES, (CLASSES,), 15929, 17231.9, 17224, 18752),
    ),
    "resnet50": Subject(
        functools.partial(_torchvision, "resnet50"),
        *(IMAGES, (CLASSES,), 11378, 11738.2, 10703, 12982),
    ),
    "vit": Subject(
        functools.partial(_torchvision, "vit_b_16"),
        *(IMAGES, (CLASSES,), 18678, 17218.1, 15999, 18142),
    ),
    "unetr": Subject(_unetr, VOLUMES, (2, 64, 64, 64), 5605, 5177.9, 3301, 9268),
}


def measure(name: str, batch_size: int | None, device: torch.device) -> dict[str, Any]:
    """Run a subject's phases on `device`; return the memory in MiB by phase and column."""
    subject, meter = SUBJECTS[name], MemoryMeter(device)
    torch.manual_seed(0)
    meter.phase("initial")
    if subject.build is None:
        elements = subject.shape[0] if batch_size is None else batch_size * 2**18
        held = torch.zeros(elements).to(device)
        meter.phase("model")
        meter.phase("train")
        own_bytes = _own_bytes(meter)
        del held
        torch.cuda.empty_cache()
        meter.phase("final")
    else:
        own_bytes = _train(subject, batch_size or subject.shape[0], device, meter)
    phases = {phase: snapshot.to_dict() for phase, snapshot in meter.phases.items()}
    return {"phases": phases, "own_device_used_mib": to_mib(own_bytes)}


def _train(
    subject: Subject, batch_size: int, device: torch.device, meter: MemoryMeter
) -> int | None:
    """Train as the study does; return the bytes that NVML knows of this process.

    Each step copies its batch. The phases `train` and `final` are read while the last batch, the
    output and the loss exist.
    """
    assert subject.build is not None
    model = subject.build().to(device)
    meter.phase("model")
    shape, target = (batch_size, *subject.shape[1:]), (batch_size, *subject.target)
    batches = [(torch.randn(shape), torch.randn(target)) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for number in range(STEPS):
        x, y = (tensor.to(device) for tensor in batches[number % 2])
        optimizer.zero_grad()
        output = model(x)
        loss = functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
    meter.phase("train")
    meter.phase("final")
    return _own_bytes(meter)


def _own_bytes(meter: MemoryMeter) -> int | None:
    """Return NVML's bytes of this process, or None where NVML does not know (in containers)."""
    if meter.device.type != "cuda":
        return None
    try:
        import pynvml

        handle = devices.nvml_handle(meter.device)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)
    except Exception:  # NVML's errors, and a missing NVML
        return None


def predicted(name: str, batch_size: int | None) -> dict[str, float]:
    """Return the predicted peaks in MiB of a subject's training step on this machine's GPU.

    Without a GPU, the assumed one is older than Hopper, as the study's, with smaller workspaces of
    cuBLAS than an H100 or H200.
    """
    subject = SUBJECTS[name]
    if subject.build is None:
        allocator = CachingAllocator()
        allocator.malloc(4 * (subject.shape[0] if batch_size is None else batch_size * 2**18))
        sizes = allocator.allocated_bytes, allocator.reserved_bytes
        return {"allocated_mib": sizes[0] / devices.MIB, "reserved_mib": sizes[1] / devices.MIB}
    prediction = predict(
        subject.build,
        batch_size=batch_size or subject.shape[0],
        input_size=subject.shape[1:],
        target_size=subject.target,
        amp="off",
        channels_last=False,
        opt=_sgd,
    )
    return {
        "allocated_mib": prediction.allocated.mib,
        "high_mib": prediction.allocated.high_bytes / devices.MIB,
        "reserved_mib": prediction.reserved.mib,
    }


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


class SubjectContender(Contender):
    """Measurement and prediction of a subject, in a new process."""

    def __init__(self, name: str, batch_size: int | None, device: torch.device) -> None:
        self.label, subject = name, SUBJECTS[name]
        self._task = {"name": name, "batch_size": batch_size, "device": str(device)}
        names = "estimate_mib", "real_mib", "alone_mib", "reserved_mib"
        study = {column: getattr(subject, column) for column in names}
        self.columns: dict[str, Any] = {
            "subject": name,
            "batch_size": batch_size or subject.shape[0],
            "study": study,
            **dict.fromkeys(("phases", "own_device_used_mib", "predicted")),
        }

    def set_up(self) -> None:
        command = [sys.executable, __file__, "--task", json.dumps(self._task)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            missing = MissingDependencyError.__name__ in done.stderr
            reason = f"exit code {done.returncode}: {last}"
            raise NoResultError("left_out" if missing else "failed", reason)
        self.columns |= json.loads(lines[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of peaks in MiB, and of errors in percent of this GPU's measurement."""
    header = ["subject", "batch", "study's estimate", "study's real", "alone", "predicted"]
    header += ["measured", "estimate %", "alone %", "predicted %", "reserved", "predicted"]
    header += ["NVML, growth"]
    lines = []
    for row in rows:
        study, ours = row["study"], row["predicted"] or {}
        phases = row["phases"] or {}
        train, initial = phases.get("train", {}), phases.get("initial", {})
        peak = train.get("max_allocated_mib")
        figures = [study["estimate_mib"], study["real_mib"], study["alone_mib"]]
        figures += [ours.get("allocated_mib"), peak]
        errors = [
            100 * (value / peak - 1) if peak and value else None
            for value in (study["estimate_mib"], study["alone_mib"], ours.get("allocated_mib"))
        ]
        used = [phase.get("device_used_mib") for phase in (train, initial)]
        growth = None if None in used else used[0] - used[1]
        cells = [*map(_cell, figures), *("-" if e is None else f"{e:+.1f}" for e in errors)]
        cells += [_cell(train.get("reserved_mib")), _cell(ours.get("reserved_mib")), _cell(growth)]
        lines.append([row["subject"], str(row["batch_size"]), *cells])
    return format_table(header, lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen subjects, print a table and write a record; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small batches")
    parser.add_argument("--time-limit-s", type=float, default=150)
    parser.add_argument("--output-dir", default="benchmarks/records")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.task is not None:
        task = json.loads(options.task)
        device = torch.device(task.pop("device"))
        # Measured first, because a prediction may leave memory of its own.
        result = {**measure(**task, device=device), "predicted": predicted(**task)}
        print(json.dumps(result))
        return 0
    for name in options.subjects:
        if name not in SUBJECTS:
            parser.error(f"expected subjects out of {', '.join(SUBJECTS)}, got {name}")
    device = devices.timed_device("cpu" if options.rehearse else "cuda")
    settings = RunSettings(time_limit_s=options.time_limit_s)
    record = RecordFile(
        options.output_dir, "memory_study", device=device, settings={"steps": STEPS}, argv=argv
    )
    batch_size = 2 if options.rehearse else None
    names = options.subjects or SUBJECTS
    group = [SubjectContender(name, batch_size, device) for name in names]
    outcome = run([[one] for one in group], settings, log=print, record=record)
    print(table(outcome.rows))
    return 0 if outcome.complete else 1


if __name__ == "__main__":
    sys.exit(shell.run(main))
