"""Comparison of the kernels with plain PyTorch on a GPU, before their first use there.

Every kernel runs forward and backward on small maps, and some on one map beyond 32-bit offsets; the
definitions in float64 say what is right. An illegal address would end the CUDA context for good, so
the comparison runs in a process of its own: `python -m tresnet.ops.selfcheck cuda:0` shows it. A
file remembers agreement for this GPU, driver and version of everything that compiles; a difference
is looked for again by the next process, as its cause may be gone by then.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from tresnet.files import fcntl

LIMIT_S = 120.0  # of compiling and running them all; some seconds are usual, without a cache
# Of the largest value: what float32 sums, and what one or two roundings to 16 bits, may be off.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_SAYS = "tresnet.ops.selfcheck: "  # before each line that the other process is to read
_BEGINS, _RIGHT, _NO_MEMORY = "has the GPU", "right", "out of memory"


class _Case(NamedTuple):
    """A use of the kernels, that together with the others launches each of them."""

    dtype: torch.dtype
    layout: torch.memory_format
    shape: tuple[int, int, int, int]
    slope: float | None
    blur: bool = False
    se: bool = False
    join: bool = False
    conv: bool = False
    training: bool = True
    copies: int = 1  # times the samples come, which changes no output


_CASES = (
    _Case(torch.bfloat16, torch.channels_last, (3, 40, 10, 9), 1e-3, blur=True, se=True),
    _Case(torch.float32, torch.contiguous_format, (2, 12, 7, 5), None, se=True, join=True),
    _Case(torch.float16, torch.channels_last, (2, 16, 6, 6), 1e-2, conv=True),
    _Case(torch.bfloat16, torch.channels_last, (2, 16, 6, 6), 1e-3, se=True, conv=True),
    _Case(torch.float32, torch.channels_last, (2, 16, 6, 6), 1e-2, training=False),
)


def failure(device: torch.device) -> str | None:
    """Return why the kernels are not to be used on `device`, None if they are right; warns once.

    Processes take turns for each type of GPU. One that waited uses what the one before it found.
    """
    known = _memory(device)
    if known.is_file():
        return None
    with _turn(known.with_suffix(".lock")) as (file, waited):
        found = file.read() if waited else ""
        if not found and not known.is_file():
            file.truncate(0)
            found = _found_by_child(device, known.name) or _found_here(device)
            if found != _NO_MEMORY:
                file.write(found)
    if found in ("", _RIGHT):
        with contextlib.suppress(OSError):  # a home that cannot be written to
            known.touch()
        return None
    reason = f"cannot use the Triton kernels on {device} ({found})"
    warnings.warn(f"tresnet {reason}; impl='auto' runs plain PyTorch there", stacklevel=2)
    return reason


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """Yield the locked file, and whether another process had it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = path.open("a+", encoding="utf-8")
    except OSError:  # a home that cannot be written to: each process for itself
        file = io.StringIO()
    waited = False
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waited = True
                    fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file, waited


def _found_by_child(device: torch.device, key: str) -> str | None:
    """Return a new process's verdict; None if it had no GPU or no memory, which says nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    try:
        child = subprocess.run(
            _command(device, key),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        output, end = child.stdout, _end(child.returncode)
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"not finished after {LIMIT_S:.0f} s"
    except OSError:
        return None
    lines = output.decode(errors="replace").splitlines()
    said = [line.removeprefix(_SAYS) for line in lines if line.startswith(_SAYS)]
    if not said or said[-1] == _NO_MEMORY:
        return None
    return end if said[-1] == _BEGINS else said[-1]


def _command(device: torch.device, key: str) -> list[str]:
    # -P: the present folder is not searched; a warning is no error there
    return [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(device), key]


def _end(code: int) -> str:
    name = signal.Signals(-code).name if code < 0 else f"status {code}"
    return f"the process that compared them ended with {name}"


def _found_here(device: torch.device) -> str:
    """Return this process's own verdict.

    A thread has no fake tensors, autocast or other modes in force, and can be left where it hangs.
    """
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_verdict(device)), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else f"not finished after {LIMIT_S:.0f} s"


def _verdict(device: torch.device) -> str:
    try:
        check(device)
    except Exception as error:  # whatever the compiler, the linker or the driver says
        text = str(error).strip() or "no message"
        if isinstance(error, MemoryError) or "out of memory" in text:
            return _NO_MEMORY
        return f"{type(error).__name__}: {text.splitlines()[-1]}"
    return _RIGHT


def main(device: torch.device, key: str | None = None) -> int:
    """Compare on `device` and print the verdict; `key` names the GPU that is meant.

    Whatever fails before the first line says nothing about the kernels.
    """
    torch.ones(1, device=device).item()
    if key not in (None, _memory(device).name):
        raise SystemExit(f"expected the GPU of {key}, got another as {device}")
    _say(_BEGINS)
    verdict = _verdict(device)
    _say(verdict)
    return int(verdict != _RIGHT)


def _say(line: str) -> None:
    sys.stdout.write(f"\n{_SAYS}{line}\n")
    sys.stdout.flush()


def check(device: torch.device) -> None:
    """Run all kernels on `device` and compare.

    Raises:
        ArithmeticError: a result differs from the definition's by more than rounding.
        Exception: they cannot be compiled or launched.
    """
    for index, case in enumerate((*_CASES, *_large(device))):
        _check_norm(case, torch.Generator().manual_seed(index), device)
    _check_blur(device)
    _check_stem(device)


def _large(device: torch.device) -> list[_Case]:
    """A case of more than 2^31 values, or of as many as three quarters of the free memory hold."""
    if device.type != "cuda":
        return []
    shape = 4, 64, 56, 56
    values = math.prod(shape)
    room = torch.cuda.mem_get_info(device)[0] * 3 // 4 // (values * 20)  # ten maps of 16 bits
    copies = min(2**31 // values + 1, room)
    case = _Case(torch.bfloat16, torch.channels_last, shape, 1e-3, se=True, copies=copies)
    return [case] if copies else []


def _check_norm(case: _Case, random: torch.Generator, device: torch.device) -> None:
    from tresnet.ops.abn import Convolution, Settings, SEWeights, fused_abn, reference

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    channels = case.shape[1]
    parts = {"x": draw(*case.shape).to(case.dtype).contiguous(memory_format=case.layout) + 0.5}
    parts |= {"weight": draw(channels), "bias": draw(channels)}
    if case.se:
        parts |= {"fc1_weight": draw(8, channels) / 2, "fc1_bias": draw(8) / 2}
        parts |= {"fc2_weight": draw(channels, 8) / 2, "fc2_bias": draw(channels) / 2}
    if case.join:
        parts["shortcut"] = draw(*case.shape).to(case.dtype)
    if case.conv:
        weight = draw(8, channels, 3, 3) / 8
        parts["conv_weight"] = weight.to(case.dtype).contiguous(memory_format=case.layout)
    settings = Settings(case.training, slope=case.slope, blur=case.blur)
    running = draw(channels) / 4, draw(channels).square() + 0.5

    def run(fused: bool) -> dict[str, Tensor]:
        copies = case.copies if fused else 1
        leaves = {k: v.clone() if fused else v.double() for k, v in parts.items()}
        leaves |= {k: torch.cat([leaves[k]] * copies) for k in ("x", "shortcut") if k in leaves}
        mean, var = (v.clone() if fused else v.double() for v in running)
        x, weight, bias, *layers = (
            v for k, v in leaves.items() if k not in ("shortcut", "conv_weight")
        )
        for leaf in leaves.values():
            leaf.requires_grad_()
        shortcut, conv_weight = leaves.get("shortcut"), leaves.get("conv_weight")
        convolution = Convolution() if case.conv else None
        if fused:
            se = SEWeights(*layers) if layers else None
            behind = convolution, conv_weight
            y, twin = fused_abn(x, weight, bias, (mean, var), shortcut, se, settings, *behind)
        else:
            y = reference.abn(x, weight, bias, mean, var, *settings[:4])
            y = reference.tail(y, case.blur, layers or None, shortcut)
            if convolution is not None and conv_weight is not None:
                y = convolution.output(y, conv_weight)
            twin = y
        size = len(y) // copies, *y.shape[1:]
        probe = torch.linspace(-1, 1, math.prod(size), device=device).view(size).to(case.dtype)
        probes = [torch.cat([p.to(y.dtype)] * copies) for p in (probe / 4, probe - probe / 4)]
        grads = torch.autograd.grad([y, twin], list(leaves.values()), probes)
        gradients = {
            f"gradient of {k}": g if k in ("x", "shortcut") else g / copies
            for k, g in zip(leaves, grads, strict=True)
        }
        found = {"output": y.detach(), "running mean": mean, "running variance": var}
        return found | gradients

    # PyTorch may multiply the matrices of an SE in TF32, which rounds like float16
    dtype = torch.float16 if case.se and case.dtype == torch.float32 else case.dtype
    found = run(fused=True)
    if device.type == "cuda":  # again: what was compiled is launched without asking Triton
        found = run(fused=True)
    for name, expected in run(fused=False).items():
        _compare(f"{name}, {case}", found[name], expected, TOLERANCE[dtype])


def _check_blur(device: torch.device) -> None:
    from tresnet.ops.blur_pool import launch, reference, transposed_blur_pool

    x = torch.linspace(-1, 1, 2 * 6 * 7 * 5, device=device).view(2, 6, 7, 5)
    y = launch.blur(x)
    _compare("blur", y, reference.blur_pool(x.double()), 1e-5)
    expected = transposed_blur_pool(y.double(), 7, 5)
    _compare("transposed blur", launch.transposed_blur(y, 7, 5), expected, 1e-5)


def _check_stem(device: torch.device) -> None:
    from tresnet.ops.space_to_depth import launch, reference

    images = (torch.arange(2 * 3 * 8 * 12, device=device) % 251).to(torch.uint8).view(2, 3, 8, 12)
    expected = reference.stem_input(images, 4, torch.float64)
    _compare("stem", launch.stem_input(images, 4, torch.float32), expected, 1e-6)


def _compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    parts = found.split(len(expected))  # of each copy of the samples
    errors = [(part.double() - expected).abs().max() for part in parts]
    error = torch.stack(errors).max().item()  # waits for the GPU
    allowed = tolerance * expected.abs().max().item()
    if not error <= allowed:  # NaN is not
        raise ArithmeticError(f"{name}: off by {error:.3g}, allowed are {allowed:.3g}")


def _memory(device: torch.device) -> Path:
    """The file that is there if the kernels were right on this device, with these versions."""
    parts = [torch.__version__, str(device.type), str(torch.version.cuda), str(torch.version.hip)]
    parts.append(_or_none(lambda: importlib.metadata.version("triton")))
    parts.append(_or_none(Path("/proc/driver/nvidia/version").read_text))
    if device.type == "cuda":
        parts.append(_or_none(lambda: str(torch.cuda.get_device_properties(device))))
    digest = hashlib.sha256("\n".join([*parts, _sources()]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tresnet" / f"kernels-right-{digest.hexdigest()[:32]}"


@functools.cache
def _sources() -> str:
    """What tells this version of the kernels and their definitions from others."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _or_none(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception:  # what cannot be asked does not tell machines apart
        return "none"


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1]), *sys.argv[2:3]))
