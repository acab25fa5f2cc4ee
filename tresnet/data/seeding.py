"""Make a sample's random numbers depend only on the seed, the epoch and the sample's index."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix_seed(*parts: int) -> int:
    """Hash integers to one seed in [0, 2**32); nearby integers give unrelated seeds."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's global CPU generators, but not CUDA's.

    timm draws from the generators of Python and NumPy, and torchvision draws from PyTorch's.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  timm's mixup draws from the global generator
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore Python's, NumPy's and PyTorch's global CPU generators after the block."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  see seed_cpu_generators
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002  see seed_cpu_generators
        torch.set_rng_state(torch_state)
