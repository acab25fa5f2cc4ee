"""Cost of the kernels: bytes moved, counted in the interpreter, and registers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.kernels import DEVICE
from tresnet.ops import pool, stem, tiles
from tresnet.ops.epilogue import Epilogue, FirstPass, Saved, SEWeights, forward, passes

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 32, 24, 24)


class Traffic:
    """Addresses a kernel touched: each access, and each byte once."""

    def __init__(self) -> None:
        self.accesses: dict[str, list[tuple[np.ndarray, int]]] = {"read": [], "write": []}

    def add(self, kind: str, pointers, mask) -> None:
        addresses = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)].reshape(-1)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.accesses[kind].append((addresses, size))

    def moved(self, kind: str) -> int:
        """Bytes that memory must deliver or take at least once."""
        each = [(at[:, None] + np.arange(size)).ravel() for at, size in self.accesses[kind]]
        return np.unique(np.concatenate(each)).size

    def accessed(self, kind: str) -> int:
        """Bytes the kernel asks for, caches included."""
        return sum(addresses.size * size for addresses, size in self.accesses[kind])


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()

    def counted(kind, mask_place, run):
        def counting_too(self, *args):
            traffic.add(kind, args[0], args[mask_place])
            return run(self, *args)

        return counting_too

    with monkeypatch.context() as patch:
        for name, *how in (("create_masked_load", "read", 1), ("create_masked_store", "write", 2)):
            run = getattr(InterpreterBuilder, name)
            patch.setattr(InterpreterBuilder, name, counted(*how, run))
        yield traffic


def operations():
    """Each launch on a batch, the bytes of full size it must read and write, and reads a byte.

    A blurred pixel is read from nine, a quarter of them new; behind a norm four share 25. The
    gradient of one is read for four squares of pixels. Memory delivers each byte once, caches the
    rest.
    """
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last)
    n, c, h, w = SHAPE
    stats, gate = torch.rand(4, c), torch.rand(n, c)
    half = torch.randn(n, c, h // 2, w // 2).to(memory_format=torch.channels_last)
    big, small = x.numel() * 4, half.numel() * 4
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    images = images.to(memory_format=torch.channels_last)
    mask = torch.randint(256, (n, h * w, c // 8), dtype=torch.uint8)
    epilogue = Epilogue(*torch.rand(2, c), slope=0.1)
    blurred, linear = epilogue._replace(blur=True), epilogue._replace(slope=None)
    saved, gated = Saved(x, stats), Saved(x, stats, gate=gate)
    joined, sums = gated._replace(mask=mask), FirstPass((), norm_grads=stats, squeeze_grad=gate)

    wide = torch.randn(2, 256, 12, 9).to(memory_format=torch.channels_last)
    of_wide = Epilogue(*torch.rand(2, 256), slope=0.1)
    layers = SEWeights(torch.rand(8, c), torch.rand(8), torch.rand(c, 8), torch.rand(c))
    se = Epilogue(None, torch.rand(c), se=layers, slope=0.1)

    def grad_sums(grad, second, saved, epilogue, rebuilds=False):
        return lambda: passes.grad_sums(grad, second, saved, epilogue, rebuilds=rebuilds)

    def apply(saved, epilogue, shortcut=None):
        joins = shortcut is not None
        return lambda: passes.apply(saved, epilogue, shortcut, needs_mask=joins)

    return {
        "statistics": (lambda: passes.statistics(x, epilogue, per_sample=False), big, 0, 1.0),
        "apply": (apply(saved, epilogue), big, big, 1.0),
        "apply_blur": (apply(saved, blurred), big, small, 25 / 16),
        "apply_join": (apply(gated, linear, x + 1), 2 * big, big + mask.nbytes, 1.0),
        "squeeze": (lambda: passes.squeeze(saved, blurred), big, 0, 1.0),
        "grad_sums": (grad_sums(x + 1, None, saved, epilogue), 2 * big, 0, 1.0),
        "grad_sums_rebuild": (grad_sums(x + 1, None, gated, epilogue, True), 2 * big, big, 1.0),
        "grad_sums_join": (
            grad_sums(x + 1, x + 3, joined, linear), 3 * big + mask.nbytes, big, 1.0,
        ),
        "grad_sums_blur": (grad_sums(half, None, saved, blurred), big + small, 0, 1.6),
        "grad_apply": (lambda: passes.gradient(x + 1, epilogue, saved, sums), 2 * big, big, 1.0),
        "grad_apply_blur": (
            lambda: passes.gradient(half, blurred, gated, sums), big + small, big, 1.6,
        ),
        "avg_pool": (lambda: pool.avg_pool(x), big, small, 1.0),
        "add_avg_pool_grad": (lambda: pool.add_avg_pool_grad(x, half), big + small, big, 1.0),
        "norm_merged": (lambda: forward(wide, of_wide), wide.nbytes, wide.nbytes, 2.0),
        "se_of_a_small_map": (lambda: forward(x, se), big, big, 2.0),
        "stem": (
            lambda: stem.stem_input(images, 4, torch.float32, kernels=True),
            images.numel(), 4 * images.numel(), 1.0,
        ),
    }  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="bytes are counted in the interpreter, on a CPU")
@pytest.mark.parametrize("name", operations())
def test_moves_no_more_than_the_ideal_bytes(name, monkeypatch):
    run, read, written, accesses = operations()[name]
    with counting(monkeypatch) as traffic:
        run()
    for kind, ideal in (("read", read), ("write", written)):
        # What is not of full size (vectors, partial sums) may come on top, up to a twentieth.
        allowed = 0.05 * max(read, written)
        assert ideal <= traffic.moved(kind) <= ideal + allowed
        repeated = accesses if kind == "read" else 1.0
        assert traffic.accessed(kind) <= 1.05 * repeated * ideal + 3 * allowed


@pytest.mark.skipif(DEVICE != "cpu", reason="addresses are noted in the interpreter, on a CPU")
def test_a_pass_that_writes_goes_from_the_end_to_the_beginning(monkeypatch):
    x = torch.randn(4, 64, 16, 16).to(memory_format=torch.channels_last)
    stats = torch.rand(4, 64)
    with counting(monkeypatch) as traffic:
        out, _ = passes.apply(Saved(x, stats), Epilogue(None, stats[0]), None, needs_mask=False)
    (first, size), (last, _) = traffic.accesses["write"][0], traffic.accesses["write"][-1]
    assert first.max() + size == out.data_ptr() + out.nbytes
    assert last.min() == out.data_ptr()


# An H100 issues 4 instructions of 32 threads a clock on each of 132 multiprocessors at 1.755 GHz,
# and its memory moves 3.35e12 bytes a second: 8.9 instructions of a thread in the time of a byte.
INSTRUCTIONS_A_BYTE = 4 * 32 * 132 * 1.755e9 / 3.35e12


def bytes_a_round(row: dict) -> float:
    """Return the bytes that a thread moves in one round of its kernel's loop, in 16 bits."""
    squares = row["kernel"].endswith("_blurred")
    optional = {"apply": ("shortcut",), "grad_sums": ("second_grad", "masked_grad", "rebuilt")}
    maps = {
        "moments": 1,
        "squeeze": 1,
        "squeeze_blurred": 1,
        "apply": 2,
        "apply_blurred": 5,
        "grad_sums": 2,
        "grad_sums_blurred": 1.25,
        "grad_apply": 3,
        "grad_apply_blurred": 2.25,
        "avg_pool": 5,
        "add_avg_pool_grad": 9,
        "excite_map": 1,
    }[row["kernel"]]
    maps += sum(name not in row for name in optional.get(row["kernel"], ()))  # absent: None
    return 2 * maps * (4 if squares else 1) * row["BP"] * row["BC"] / row["threads"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes with empty caches
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "float16"), (80, "float32"), (90, "bfloat16")]
)
def test_no_kernel_spills_registers_or_computes_longer_than_it_moves(capability, dtype):
    command = [sys.executable, "-m", "tests.ops.compile_kernels", str(capability), dtype]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({row["kernel"] for row in rows}) == 18
    # Triton 3.6 gives one kernel of SE a frame of 8 bytes, which are not registers spilled, and for
    # an A100 in float32 lets the largest `grad_sums` spill two.
    frame = {"excite": 8, "grad_sums": 8} if version("triton").startswith("3.6.") else {}
    assert [r for r in rows if r["stack"] > frame.get(r["kernel"], 0) or r["local"]] == []
    assert max(row["reg"] for row in rows) < 255
    assert max(row["shared"] for row in rows) <= 99 * 1024  # all GPUs of capability 8.0 have that
    # Single 16-bit values are moved only where the width leaves no choice.
    single = {row["AC"] for row in rows if row["narrowest"] == 2}
    assert single == (set() if dtype == "float32" else {1})
    assert {row["narrowest"] for row in rows if "RUN" in row} == {4}  # of bytes
    # Where the channels allow it, kernels that write maps load and store 16 bytes, vectors too.
    # Only the statistics of 32 channels, which `apply` stores if it merges moments, are single.
    size = 4 if dtype == "float32" else 2
    writing = {"apply", "apply_blurred", "grad_apply", "grad_apply_blurred"}
    writing |= {"avg_pool", "add_avg_pool_grad"}
    wide = [row for row in rows if row["kernel"] in writing and row["AC"] * size == 16]
    merging = [row for row in wide if row["kernel"] == "apply" and "partial" not in row]
    assert {row["narrowest"] for row in merging} == {4}
    assert min(row["blocks"] for row in merging) >= passes.MERGED_RESIDENT
    assert {row["narrowest"] for row in wide if row not in merging} == {16}
    assert {row["kernel"] for row in wide} == writing
    # Sums, but for those with a blur, load ahead, and as many programs fit as launches assume.
    settings = {name.rpartition(".")[2]: row for name, row in passes.PASSES.items()}
    for row in (row for row in rows if row["kernel"] in settings.keys() - writing):
        if row["AC"] * size == 16:
            assert row["ahead"] == (not row["kernel"].endswith("_blurred")), row
            fitting = settings[row["kernel"]].resident[row.get("SUMS") == 4]
            blocks = row["blocks"] * row["threads"] // 128  # some launches have twice the warps
            fitting = passes.MERGED_RESIDENT if row["threads"] > 128 else fitting
            assert capability != 90 or blocks >= fitting, row
    # Layers of SE multiply by tensor cores, and load weights ahead. At the widths of tresnet_m,
    # `excite` has 9 barriers and `excite_grads` 11, and two more by Triton 3.6.
    for row in (row for row in rows if "products" in row):
        assert row["products"] >= 48, row
        assert row["async"] >= 24, row
        assert row["shuffles"] == 0, row
        if row["AC"] == row["AR"] == 4 and row["kernel"] != "excite_weight_grads":
            most = {"excite": 9, "excite_grads": 11}[row["kernel"]]
            assert row["barriers"] <= most + 2 * version("triton").startswith("3.6."), row
    loops = [row for row in rows if "loop" in row]
    assert len({row["kernel"] for row in loops}) == (12 if capability == 90 else 0)
    for row in loops:
        assert 0 < row["loop"] < INSTRUCTIONS_A_BYTE * bytes_a_round(row), row


@pytest.mark.parametrize(("channels", "width"), [(3, 4), (12, 16), (64, 64), (76, 32), (83, 32)])
def test_a_tile_is_no_wider_than_the_channels_need(channels, width):
    assert tiles.tile(4096, channels, 2, False, 1) == (tiles.TILE // width, width)


COUNT = """
import json
from benchmarks.kernel_table import compile_for, compiled, recorded_step
compile_for(90)
steps = [recorded_step("tresnet_m", batch)[0] for batch in (256, 100)]
counts = [[len(step), sorted({compiled(launch).hash for launch in step})] for step in steps]
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_a_step_needs_few_kernels_the_same_at_every_batch_size():
    command = [sys.executable, "-c", COUNT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    first, second = json.loads(result.stdout)
    assert first == second
    launches, kernels = first
    assert 300 < launches <= 372
    assert len(kernels) <= 40
