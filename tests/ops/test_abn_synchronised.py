"""Statistics shared by processes: two halves of a batch give what the whole batch gives."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ops.test_abn_kernels import CHAINS, run, tensors
from tresnet.ops.abn import SEWeights, abn

WORLD = 2
SIZES = (4, 1)  # images of each process: not the same number


def half(rank: int, folder: str, names: list[str]) -> None:
    """One process: forward and backward on its images, the results written to a file."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    start = sum(SIZES[:rank])
    results = {}
    for name in names:
        chain, (parts, grad) = CHAINS[name], torch.load(f"{folder}/{name}.pt", weights_only=True)
        mine = slice(start, start + SIZES[rank])
        parts = {k: v[mine] if k in ("x", "shortcut") else v for k, v in parts.items()}
        leaves = {k: v.clone().requires_grad_() for k, v in parts.items()}
        mean, var = torch.zeros(6), torch.ones(6)
        y = abn(
            leaves["x"], leaves["weight"], leaves["bias"], mean, var, training=True,
            slope=chain.slope, blur=chain.blur,
            se=SEWeights(*list(leaves.values())[3:7]) if chain.se else None,
            shortcut=leaves.get("shortcut"), group=dist.group.WORLD, impl="triton",
        )  # fmt: skip
        y.backward(grad[mine])
        results[name] = {"y": y.detach(), "mean": mean, "var": var}
        results[name] |= {f"grad of {k}": v.grad for k, v in leaves.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on the interpreter, on a CPU")
def test_two_processes_equal_one(tmp_path: Path):
    names = ["abn", "blur_se", "se_join"]
    inputs = {}
    for name in names:
        # without a blur the second process has one value per channel
        shape = (sum(SIZES), 6, 5, 4) if name == "blur_se" else (sum(SIZES), 6, 1, 1)
        parts = tensors(shape, CHAINS[name], "nhwc")
        y = run(parts, CHAINS[name], "reference")["y"]
        inputs[name] = parts, torch.randn_like(y)
        torch.save(inputs[name], tmp_path / f"{name}.pt")
    mp.spawn(half, (str(tmp_path), names), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for name in names:
        chain, (parts, grad) = CHAINS[name], inputs[name]
        leaves = {k: v.double().requires_grad_() for k, v in parts.items()}
        mean, var = torch.zeros(6).double(), torch.ones(6).double()
        y = abn(
            leaves["x"], leaves["weight"], leaves["bias"], mean, var, training=True,
            slope=chain.slope, blur=chain.blur,
            se=SEWeights(*list(leaves.values())[3:7]) if chain.se else None,
            shortcut=leaves.get("shortcut"), impl="reference",
        )  # fmt: skip
        y.backward(grad.double())
        expected = {"y": y.detach()} | {f"grad of {k}": v.grad for k, v in leaves.items()}
        for key, value in expected.items():
            ours = [rank[name][key] for rank in ranks]
            split = key in ("y", "grad of x", "grad of shortcut")
            joined = torch.cat(ours) if split else ours[0] + ours[1]
            torch.testing.assert_close(
                joined.double(), value, rtol=1e-4, atol=1e-5 * value.abs().max().item()
            )
        for rank in ranks:
            torch.testing.assert_close(rank[name]["mean"].double(), mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rank[name]["var"].double(), var, rtol=1e-5, atol=1e-6)
