"""Whether the kernels give on a GPU what plain operators give: asked before they are first used.

Small maps go through every kernel, forward and backward, and through the definitions in float64.
That they agree is remembered on disk for this GPU, driver and version of everything that compiles;
that they do not is asked again by the next process, as its cause may be gone by then.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT_S = 120.0  # of compiling and running them all; some seconds are usual, without a cache
# Of the largest value: what float32 sums, and what one or two roundings to 16 bits, may be off.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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


_CASES = (
    _Case(torch.bfloat16, torch.channels_last, (3, 40, 10, 9), 1e-3, blur=True, se=True),
    _Case(torch.float32, torch.contiguous_format, (2, 12, 7, 5), None, se=True, join=True),
    _Case(torch.float16, torch.channels_last, (2, 16, 6, 6), 1e-2, conv=True),
    _Case(torch.bfloat16, torch.channels_last, (2, 16, 6, 6), 1e-3, se=True, conv=True),
    _Case(torch.float32, torch.channels_last, (2, 16, 6, 6), 1e-2, training=False),
)


def failure(device: torch.device) -> str | None:
    """Return why the kernels are not to be used on `device`, None if they are right; warns once."""
    known = _memory(device)
    if known.is_file():
        return None
    found: list[str] = []

    def run() -> None:
        try:
            check(device)
        except Exception as error:  # whatever the compiler, the linker or the driver says
            text = str(error).strip() or "no message"
            found.append(f"{type(error).__name__}: {text.splitlines()[-1]}")

    # in a thread, where no fake tensors, autocast or other modes are in force, and of which a hang
    # can be left alone
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        found.append(f"not finished after {LIMIT_S:.0f} s")
    if found:
        reason = f"cannot use the Triton kernels on {device} ({found[0]})"
        warnings.warn(f"tresnet {reason}; impl='auto' runs plain PyTorch there", stacklevel=2)
        return reason
    with contextlib.suppress(OSError):  # a home that cannot be written to
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    return None


def check(device: torch.device) -> None:
    """Run all kernels on `device` and compare.

    Raises:
        ArithmeticError: a result differs from the definition's by more than rounding.
        Exception: they cannot be compiled or launched.
    """
    for index, case in enumerate(_CASES):
        _check_norm(case, torch.Generator().manual_seed(index), device)
    _check_blur(device)
    _check_stem(device)


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
        leaves = {k: v.clone() if fused else v.double() for k, v in parts.items()}
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
        probe = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(case.dtype)
        probes = [part.to(y.dtype) for part in (probe / 4, probe - probe / 4)]
        grads = torch.autograd.grad([y, twin], list(leaves.values()), probes)
        gradients = {f"gradient of {k}": g for k, g in zip(leaves, grads, strict=True)}
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
    error = (found.double() - expected).abs().max().item()  # waits for the GPU
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
