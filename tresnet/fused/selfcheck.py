"""Check of a model's kernels before their first use on a GPU, by `compare`.

An illegal address in a kernel breaks a process's CUDA context, so the check has its own process. An
empty file records a success, so that later processes need no check. The file's name is a hash of
the model, the type of GPU, the driver, the sources and the versions of packages. A failure is not
recorded, so the next process checks again.

    python -m tresnet.fused.selfcheck cuda:0 tresnet_m bf16     # check by hand
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from tresnet.fused.compare import Subject, compare

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LIMIT_S = 300.0  # the check takes some seconds if kernels must be compiled
_PREFIX = "tresnet.fused.selfcheck: "  # prefix of lines that the parent process reads
_BEGINS, _RIGHT, _NO_MEMORY = "has the GPU", "right", "out of memory"

_failures: dict[Path, str | None] = {}  # cache of `failure`


def failure(device: torch.device, subject: Subject) -> str | None:
    """Return the reason if a model's kernels fail on `device`, or None if the kernels are right.

    A failure also gives a warning. Of several processes with one type of GPU, the first process
    runs the check, and the others wait for the result.
    """
    path = success_file(device, subject)
    if path not in _failures:
        _failures[path] = _failure(device, subject, path)
    return _failures[path]


def _failure(device: torch.device, subject: Subject, path: Path) -> str | None:
    if path.is_file():
        return None
    with _locked(path.with_suffix(".lock")) as (file, waited):
        verdict = file.read() if waited else ""
        if not verdict and not path.is_file():
            file.truncate(0)
            verdict = _verdict_of_child(device, subject) or _verdict_of_thread(device, subject)
            if verdict != _NO_MEMORY:
                file.write(verdict)
    if verdict in ("", _RIGHT):
        _record_success(path)
        return None
    reason = f"cannot use the Triton kernels on {device} ({verdict})"
    warnings.warn(f"tresnet {reason}; impl='auto' runs plain modules there", stacklevel=2)
    return reason


def _record_success(path: Path) -> None:
    with contextlib.suppress(OSError):  # the folder may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """Yield a locked file, and whether this process had to wait for the lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = path.open("a+", encoding="utf-8")
    except OSError:  # the folder is read-only, so every process runs the check
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


def _verdict_of_child(device: torch.device, subject: Subject) -> str | None:
    """Check in a new process and return the verdict, or None if that process cannot check.

    For example, the new process gets no GPU or no memory, or a module cannot be pickled.
    """
    try:
        pickled = pickle.dumps(subject)
    except Exception:  # a user's modules may raise errors of any type
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    try:
        child = subprocess.run(
            _command(device, success_file(device, subject).name),
            env=environment,
            input=pickled,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        output, end = child.stdout, _exit_text(child.returncode)
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"not finished after {LIMIT_S:.0f} s"
    except OSError:
        return None
    lines = output.decode(errors="replace").splitlines()
    reports = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    if not reports or reports[-1] == _NO_MEMORY:
        return None
    return end if reports[-1] == _BEGINS else reports[-1]


def _command(device: torch.device, key: str) -> list[str]:
    # with -P, Python does not search the current folder for modules
    return [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(device), "--subject", key]


def _exit_text(code: int) -> str:
    name = signal.Signals(-code).name if code < 0 else f"status {code}"
    return f"the process that checked the kernels ended with {name}"


def _verdict_of_thread(device: torch.device, subject: Subject) -> str:
    # A new thread has no autocast or fake tensor mode. If it hangs, the caller ends with a verdict.
    verdicts: list[str] = []

    def run() -> None:
        # restores the random generators of the process, from which the thread draws
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            verdicts.append(_verdict(device, subject))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return verdicts[0] if verdicts else f"not finished after {LIMIT_S:.0f} s"


def _verdict(device: torch.device, subject: Subject) -> str:
    try:
        compare(subject, device)
    except Exception as error:  # compilers, linkers and drivers raise errors of any type
        text = str(error).strip() or "no message"
        if isinstance(error, MemoryError) or "out of memory" in text:
            return _NO_MEMORY
        return f"{type(error).__name__}: {text.splitlines()[-1]}"
    return _RIGHT


def main(device: torch.device, subject: Subject, key: str | None = None) -> int:
    """Check the kernels on `device` and print the verdict; return 0 if the kernels are right.

    `key` is the name of the file that records a success on the parent process's GPU. If `device`
    is a GPU of another type than that GPU, this process exits without a verdict.
    """
    try:
        torch.ones(1, device=device).item()
    except (AssertionError, RuntimeError) as error:  # no driver, no such GPU, or a busy GPU
        why = str(error).partition("\n")[0]
        raise SystemExit(f"expected a GPU that PyTorch can use, got {device} ({why})") from None
    path = success_file(device, subject)
    if key not in (None, path.name):
        raise SystemExit(f"expected the GPU of {key}, got another GPU as {device}")
    _report(_BEGINS)
    verdict = _verdict(device, subject)
    if verdict == _RIGHT:
        _record_success(path)
    _report(verdict)
    return int(verdict != _RIGHT)


def _report(line: str) -> None:
    sys.stdout.write(f"\n{_PREFIX}{line}\n")
    sys.stdout.flush()


def success_file(device: torch.device, subject: Subject) -> Path:
    """Return the path of the file that exists if a model's kernels have passed the check."""
    parts = [torch.__version__, str(device.type), str(torch.version.cuda), str(torch.version.hip)]
    parts.append(_read_or_none(lambda: importlib.metadata.version("triton")))
    parts.append(_read_or_none(Path("/proc/driver/nvidia/version").read_text))
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        parts.append(f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.total_memory >> 30} GiB")
    key = repr(subject._replace(children=()))  # `text` describes the children
    digest = hashlib.sha256("\n".join([*parts, _sources(), key]).encode())
    home = os.environ.get("XDG_CACHE_HOME") or _read_or_none(lambda: str(Path.home() / ".cache"))
    folder = Path(tempfile.gettempdir() if home == "none" else home)
    return folder / "tresnet" / f"kernels-right-{digest.hexdigest()[:32]}"


@functools.cache
def _sources() -> str:
    rooms = Path(__file__).parent, Path(__file__).parents[1] / "ops"
    sources = sorted(source for room in rooms for source in room.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _read_or_none(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception:  # errors of any type; an unknown version counts as "none"
        return "none"


def _arguments() -> tuple[Any, ...]:
    from tresnet.fused.compare import describe
    from tresnet.models import zoo
    from tresnet.settings import torch_dtype

    device, *rest = sys.argv[1:] or ["cuda:0"]
    if rest[:1] == ["--subject"]:
        return torch.device(device), pickle.load(sys.stdin.buffer), *rest[1:]
    name, precision = (rest + ["tresnet_m", "bf16"][len(rest) :])[:2]
    model, dtype = zoo.build(name, device="meta"), torch_dtype(precision)  # pyright: ignore
    model = model.to(memory_format=torch.channels_last)
    x = torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")
    x = x.to(memory_format=torch.channels_last)
    return torch.device(device), describe(list(model.body.named_children()), x, dtype)


if __name__ == "__main__":
    sys.exit(main(*_arguments()))
