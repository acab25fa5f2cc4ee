"""Read a model's outputs: all metrics, tables and predictions take their figures from here.

Outputs that are not finite have no likeliest class. So they are counted by `finite` before anything
else reads them, and `not_finite` is their error. A prediction is made once, by `ranked` or
`present`, because different functions of PyTorch choose different classes of equal logits.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tresnet.errors import InputError, OutputError, listed
from tresnet.settings import Compute, InferenceCompute, Threshold


def finite(logits: Tensor) -> Tensor:
    """Return whether all logits (N, classes) of an image are finite: (N,), bool."""
    return logits.isfinite().all(1)


def ranked(logits: Tensor, count: int) -> Tensor:
    """Return the indices (N, count) of the likeliest classes; the first of equal logits leads."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]


def probabilities(logits: Tensor, *, multi: bool) -> Tensor:
    """Return the probability of each class, float64; `multi` if an image may have several labels.

    `logits` (N, classes) are on the CPU, because not all devices compute in float64.
    """
    return logits.double().sigmoid() if multi else logits.double().softmax(1)


def present(chances: Tensor, threshold: Threshold) -> Tensor:
    """Return which probabilities (N, classes) are at least `threshold`, a number or (classes,)."""
    return chances >= torch.tensor(threshold, dtype=torch.float64)


def read_threshold(
    option: float | str | Sequence[float], classes: Sequence[str] | None, count: int
) -> Threshold:
    """Return a threshold for all labels, or one for each of the `count` classes.

    `option` is such a value, or the path of a JSON file: an object with the threshold of each of
    `classes`, or a list in the order of the outputs. InputError: the file or a value is not valid.
    """
    values: Any = option
    if isinstance(option, str):
        try:
            values = json.loads(Path(option).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"--threshold: no readable JSON in {option}: {error}") from error
    if isinstance(values, dict) and values.keys() == set(classes or ()):
        values = [values[name] for name in classes or ()]
    several = isinstance(values, list | tuple)
    numbers: list[Any] = list(values) if several else [values]
    valid = all(type(v) in (int, float) and 0 <= v <= 1 for v in numbers)
    if not valid or (several and len(numbers) != count):
        got = sorted(values) if isinstance(values, dict) else values
        raise InputError(
            f"--threshold: expected a number from 0 to 1, one for all or one for each of the"
            f" {count} classes ({listed(classes or (), 5)}), got {got!r:.80}"
        )
    return tuple(map(float, numbers)) if several else float(numbers[0])


def reordered(threshold: Threshold, order: Sequence[int] | None) -> Threshold:
    """Return the thresholds of the outputs `order`; None means all in their order."""
    if order is None or not isinstance(threshold, tuple):
        return threshold
    return tuple(threshold[index] for index in order)


def not_finite(count: int, images: int, compute: Compute | None) -> OutputError:
    """Return the error for `count` of `images` images; `compute` is None for exported files."""
    amp, dtype = "off" if compute is None else compute.amp, "fp32"
    if isinstance(compute, InferenceCompute):
        dtype = compute.dtype
    advice = "take other weights, such as an earlier checkpoint"
    for option, value, wide in (("--amp", amp, "off"), ("--dtype", dtype, "fp32")):
        if value in ("fp16", "bf16"):
            dtype, advice = value, f"choose {option} {wide}{', or bf16' * (value == 'fp16')}"
    return OutputError(
        f"expected finite outputs, got infinities or NaN for {count} of {images} images in {dtype}:"
        f" {advice}"
    )
