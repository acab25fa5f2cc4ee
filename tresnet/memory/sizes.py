"""Sizes in bytes: the constants, and reading and printing them with their unit."""

import re

from tresnet.errors import InputError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_size(size: str | int) -> int:
    """Bytes from `80GiB`, `512 MiB`, `24GB` (powers of ten) or a plain count of bytes.

    Raises:
        InputError: not a size, an unknown unit, or not above zero.
    """
    if isinstance(size, int):
        n_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise InputError(
                f"expected a size such as '80GiB', '512MiB' or a number of bytes, got {size!r}"
            )
        n_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if n_bytes <= 0:
        raise InputError(f"expected a size above zero, got {size!r}")
    return n_bytes


def mib(n_bytes: float) -> str:
    """`1234.5 MiB`."""
    return f"{n_bytes / MIB:.1f} MiB"
