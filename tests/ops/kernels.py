"""What the tests of the kernels share: the device they run on, and uninitialised memory as NaN."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tresnet.ops import tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # interpreted on a CPU


def _accept_scalars_of_one_dimension() -> None:
    """Let Triton 3.6, of torch 2.11, loop in its interpreter with a NumPy that is newer than it."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if DEVICE == "cpu":
    _accept_scalars_of_one_dimension()
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: a value that a kernel forgets to write shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        with warnings.catch_warnings():
            # the plain operators' padding has no deterministic gradient on a GPU
            warnings.filterwarnings("ignore", message=".*deterministic implementation.*")
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs with large tiles: the interpreter's time goes by the number of operations."""
    if DEVICE == "cpu":
        for name, value in (("TILE", 1 << 16), ("BLUR_TILE", 1 << 16), ("PROGRAMS", 1)):
            monkeypatch.setattr(tiles, name, value)
