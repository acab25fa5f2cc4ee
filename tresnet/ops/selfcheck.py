"""Check of the Triton kernels against plain PyTorch, before their first use on a GPU.

The check runs every kernel on small maps, and some on a map with offsets beyond 32 bits. The
expected results are computed by the plain definitions in float64. An illegal address would break
the CUDA context, so the check runs in a separate process; `python -m tresnet.ops.selfcheck cuda:0`
runs it by hand. A file records success for the GPU, the driver, the sources of `tresnet.ops` and
the versions of packages. After a failure the next process checks again: the cause may be gone.
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
from tresnet.ops import tiles

LIMIT_S = 120.0  # time limit; the check takes some seconds if kernels must be compiled
# Largest error allowed for a dtype, relative to the largest expected value. In 16 bits, a result
# may have been rounded twice.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_SAYS = "tresnet.ops.selfcheck: "  # prefix of lines that the parent process reads
_BEGINS, _RIGHT, _NO_MEMORY = "has the GPU", "right", "out of memory"


class _Case(NamedTuple):
    """A norm and map to check; all cases together launch every kernel of `abn` and `excite`."""

    dtype: torch.dtype
    layout: torch.memory_format
    shape: tuple[int, int, int, int]
    slope: float | None
    blur: bool = False
    se: bool = False
    join: bool = False
    again: bool = False
    training: bool = True
    copies: int = 1  # repetitions of the samples; every copy must give the same output


_CASES = (
    _Case(torch.bfloat16, torch.channels_last, (3, 40, 10, 9), 1e-3, blur=True, se=True),
    _Case(torch.float32, torch.contiguous_format, (2, 12, 7, 5), None, se=True, join=True),
    _Case(torch.float16, torch.channels_last, (2, 16, 6, 6), 1e-2, again=True),
    _Case(torch.bfloat16, torch.channels_last, (2, 16, 6, 6), 1e-3, se=True, again=True),
    _Case(torch.float32, torch.channels_last, (2, 16, 6, 6), 1e-2, training=False),
)


def failure(device: torch.device) -> str | None:
    """Return why the kernels must not be used on `device`, or None if they are right.

    A failure also gives a warning. Of all processes with the same type of GPU, one runs the check,
    and the others wait for its result.
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
        with contextlib.suppress(OSError):  # the home folder may be read-only
            known.touch()
        return None
    reason = f"cannot use the Triton kernels on {device} ({found})"
    warnings.warn(f"tresnet {reason}; impl='auto' runs plain PyTorch there", stacklevel=2)
    return reason


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """Yield the locked file, and whether another process had locked it before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = path.open("a+", encoding="utf-8")
    except OSError:  # the home folder is read-only, so every process runs the check
        file = io.StringIO()
    waited = False
    with file:
        with contextlib.suppress(OSError):  # the file system may lack locks
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waited = True
                    fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file, waited


def _found_by_child(device: torch.device, key: str) -> str | None:
    """Return the verdict of a new process, or None if that process lacked the GPU or memory."""
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
    # with -P, Python does not search the current folder for modules
    return [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(device), key]


def _end(code: int) -> str:
    name = signal.Signals(-code).name if code < 0 else f"status {code}"
    return f"the process that compared them ended with {name}"


def _found_here(device: torch.device) -> str:
    # A new thread has no autocast, fake tensor mode or other mode. If it hangs, its caller goes on.
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_verdict(device)), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else f"not finished after {LIMIT_S:.0f} s"


def _verdict(device: torch.device) -> str:
    try:
        check(device)
    except Exception as error:  # compilers, linkers and drivers raise errors of any type
        text = str(error).strip() or "no message"
        if isinstance(error, MemoryError) or "out of memory" in text:
            return _NO_MEMORY
        return f"{type(error).__name__}: {text.splitlines()[-1]}"
    return _RIGHT


def main(device: torch.device, key: str | None = None) -> int:
    """Check the kernels on `device` and print the verdict; return 0 if the kernels are right.

    `key` is the name of the file in which the parent process records success for its GPU. If
    `device` is another GPU, the process exits without a verdict.
    """
    try:
        torch.ones(1, device=device).item()
    except (AssertionError, RuntimeError) as error:  # no driver, no such GPU, or a busy one
        why = str(error).partition("\n")[0]
        raise SystemExit(f"expected a GPU that PyTorch can use, got {device} ({why})") from None
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
    """Run all kernels on `device`, and compare the results with the definitions.

    Raises:
        ArithmeticError: a result differs from its definition by more than rounding.
        Exception: a kernel cannot be compiled or launched.
    """
    for index, case in enumerate((*_CASES, *_large(device))):
        _check_norm(case, torch.Generator().manual_seed(index), device)
    _check_stem(device)


def _large(device: torch.device) -> list[_Case]:
    """Return a case of over 2^31 values, of fewer if the GPU lacks memory for them, or none."""
    if device.type != "cuda":
        return []
    shape = 4, 64, 56, 56
    values = math.prod(shape)
    room = torch.cuda.mem_get_info(device)[0] * 3 // 4 // (values * 20)  # bytes of ten 16-bit maps
    copies = min(2**31 // values + 1, room)
    case = _Case(torch.bfloat16, torch.channels_last, shape, 1e-3, se=True, copies=copies)
    return [case] if copies else []


def _check_norm(case: _Case, random: torch.Generator, device: torch.device) -> None:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    channels = case.shape[1]
    parts = {"x": draw(*case.shape).to(case.dtype).contiguous(memory_format=case.layout) + 0.5}
    if case.join:
        parts["shortcut"] = draw(*case.shape).to(case.dtype)
    parts |= {"weight": draw(channels), "bias": draw(channels)}
    if case.se:
        parts |= {"fc1_weight": draw(8, channels) / 2, "fc1_bias": draw(8) / 2}
        parts |= {"fc2_weight": draw(channels, 8) / 2, "fc2_bias": draw(channels) / 2}
    running = draw(channels) / 4, draw(channels).square() + 0.5
    exact = _defined(case, parts, running)
    # float32 results of an SE get the tolerance of float16
    dtype = torch.float16 if case.se and case.dtype == torch.float32 else case.dtype
    found = _launched(case, parts, running, exact["output"])
    if device.type == "cuda":  # this second run tests launches that bypass Triton's launcher
        found = _launched(case, parts, running, exact["output"])
    for name, expected in exact.items():
        _compare(f"{name}, {case}", found[name], expected, TOLERANCE[dtype])


def _probes(case: _Case, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the output from two consumers; without a shortcut the second is 0."""
    probe = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(case.dtype)
    second = probe / 4 if case.join else torch.zeros_like(probe)
    return probe - second, second


def _defined(
    case: _Case, parts: dict[str, Tensor], running: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return outputs and gradients of the plain definition in float64."""
    from tresnet.ops.abn import reference

    leaves = {name: part.double().requires_grad_() for name, part in parts.items()}
    mean, var = (part.double() for part in running)
    rest = dict(leaves)
    x, shortcut = rest.pop("x"), rest.pop("shortcut", None)
    weight, bias, *layers = rest.values()
    y = reference.abn(x, weight, bias, mean, var, case.training, 0.1, 1e-5, case.slope)
    y = reference.tail(y, case.blur, layers or None, shortcut)
    first, second = (part.double() for part in _probes(case, y))
    grads = torch.autograd.grad(y, list(leaves.values()), first + second)
    found = {"output": y.detach(), "running mean": mean, "running variance": var}
    found |= {"output again": y.detach()} if case.again else {}
    return found | {f"gradient of {k}": g for k, g in zip(leaves, grads, strict=True)}


def _launched(
    case: _Case, parts: dict[str, Tensor], running: tuple[Tensor, Tensor], exact: Tensor
) -> dict[str, Tensor]:
    """Return outputs and gradients of the kernels; parameters' gradients are means over copies."""
    from tresnet.ops import abn

    def repeated(part: Tensor) -> Tensor:
        return torch.cat([part] * case.copies)

    mean, var = (part.clone() for part in running)
    layers = [part for name, part in parts.items() if name.startswith("fc")]
    norm = abn.Norm(
        parts["weight"], parts["bias"], mean, var, case.training, 0.1, slope=case.slope,
        blur=case.blur, se=abn.SEWeights(*layers) if layers else None,
    )  # fmt: skip
    shortcut = repeated(parts["shortcut"]) if case.join else None
    x = repeated(parts["x"])
    shortcut = None if shortcut is None else tiles.dense(shortcut, x)
    y, kept = abn.forward(x, norm, kernels=True, shortcut=shortcut, keeps=True)
    first, second = (tiles.dense(repeated(part), x) for part in _probes(case, exact))
    sums = abn.gradient_sums(
        first, second if case.join else None, norm, kept, kernels=True, rebuilds=case.again
    )
    masked = sums.written if case.join and sums.written is not None else first
    found = {"output": y, "running mean": mean, "running variance": var}
    found |= {"output again": sums.written} if case.again and sums.written is not None else {}
    found["gradient of x"] = abn.gradient(masked, norm, kept, sums, kernels=True)
    found["gradient of shortcut"] = masked
    vectors = {"weight": sums.merged[0], "bias": sums.merged[1]}
    vectors |= {} if sums.se is None else sums.se._asdict()
    return found | {f"gradient of {k}": part / case.copies for k, part in vectors.items()}


def _check_stem(device: torch.device) -> None:
    from tresnet.ops.space_to_depth import launch, reference

    images = (torch.arange(2 * 3 * 8 * 12, device=device) % 251).to(torch.uint8).view(2, 3, 8, 12)
    expected = reference.stem_input(images, 4, torch.float64)
    _compare("stem", launch.stem_input(images, 4, torch.float32), expected, 1e-6)


def _compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    parts = found.split(len(expected))  # one part for each copy of the samples
    errors = [(part.double() - expected).abs().max() for part in parts]
    error = torch.stack(errors).max().item()  # waits for the GPU
    allowed = tolerance * expected.abs().max().item()
    if not error <= allowed:  # also true for NaN
        raise ArithmeticError(f"{name}: off by {error:.3g}, allowed are {allowed:.3g}")


def _memory(device: torch.device) -> Path:
    """Return the path of the file that records success for this GPU, sources and versions."""
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
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _or_none(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception:  # an unknown version is written as "none"
        return "none"


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1]), *sys.argv[2:3]))
