"""Statistics shared by processes: two halves of a batch give what the whole batch gives."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.fused.models import make
from tests.ops.test_abn_kernels import CHAINS, joined, run, tensors
from tresnet.fused import padding
from tresnet.layers.norm import ABN

WORLD_SIZE = 2
SIZES = ((4, 1), (5, 0))  # images of each process: not the same number, and none at all
WIDTH_FACTOR = 0.3  # 19 channels
Case = tuple[str, tuple[int, int]]


def half(rank: int, folder: str, cases: list[Case]) -> None:
    """One process: forward and backward on its images, the results written to a file."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    padding.FROM = 1  # the process without images does not pad, the other does
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    results = {}
    for name, sizes in cases:
        parts, grad = torch.load(f"{folder}/{name}.pt", weights_only=True)
        start = sum(sizes[:rank])
        mine = slice(start, start + sizes[rank])
        parts = {k: v[mine] if k in ("x", "shortcut") else v for k, v in parts.items()}
        results[name, sizes] = run(
            parts, CHAINS[name], "triton", grad=grad[mine], group=dist.group.WORLD
        )
    results["model"] = step(rank, network(), torch.load(f"{folder}/images.pt"))
    results["mixed"] = mixed_step(rank, torch.load(f"{folder}/images.pt"))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def network() -> nn.Module:
    """Blocks with and without a norm in the shortcut, which both wait for the other process."""
    model = make(width_factor=WIDTH_FACTOR)
    for module in model.modules():
        if isinstance(module, ABN):
            module.synchronised = True
    return model


def mixed_step(rank: int, images: Tensor) -> dict[str, Tensor]:
    """A step of one image a process, of which each runs other parts as plain modules.

    Buckets of a few gradients are reduced among the norms' collectives.
    """
    warnings.simplefilter("ignore")
    model = network().double()
    model.set_impl("reference")
    for name in (("layer2", "layer4"), ("conv1", "layer2.0.downsample.1.bn", "layer3"))[rank]:
        model.body.get_submodule(name).register_forward_hook(lambda *_: None)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    parallel(images[rank : rank + 1].double()).square().sum().backward()
    return {f"grad of {k}": WORLD_SIZE * p.grad for k, p in model.named_parameters()}


def step(rank: int, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Forward and backward of the images of one process: the first has them all."""
    model(images if rank == 0 else images[:0]).square().sum().backward()
    return dict(model.named_buffers()) | {
        f"grad of {k}": p.grad for k, p in model.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on the interpreter, on a CPU")
def test_two_processes_equal_one(tmp_path: Path):
    inputs = {}
    for name in ("abn", "blur_se", "se_join"):
        # without a blur the second process has one value per channel
        shape = (5, 6, 5, 4) if name == "blur_se" else (5, 6, 1, 1)
        parts = tensors(shape, CHAINS[name], "nhwc")
        y = run(parts, CHAINS[name], "reference")["y"]
        inputs[name] = parts, torch.randn_like(y)
        torch.save(inputs[name], tmp_path / f"{name}.pt")
    torch.manual_seed(1)  # of 0, one value is 9e-7 off the kink of its activation
    images = torch.rand(2, 3, 32, 32)
    torch.save(images, tmp_path / "images.pt")
    cases = [(name, sizes) for name in inputs for sizes in SIZES]
    mp.start_processes(half, (str(tmp_path), cases), nprocs=WORLD_SIZE, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    for name, sizes in cases:
        parts, grad = inputs[name]
        expected = run(parts, CHAINS[name], "reference", dtype=torch.float64, grad=grad)
        found = joined([rank[name, sizes] for rank in ranks])
        for key, value in expected.items():
            atol = 1e-5 * value.abs().max().item()
            torch.testing.assert_close(found[key].double(), value, rtol=1e-4, atol=atol)
    exact = step(0, make("reference", width_factor=WIDTH_FACTOR).double(), images.double())
    for rank in ranks:
        for key, value in rank["mixed"].items():
            torch.testing.assert_close(value, exact[key], rtol=1e-8, atol=1e-8)
    # In another order of its norms the empty process would answer the wrong one of the other.
    expected = step(0, make("reference", width_factor=WIDTH_FACTOR), images)
    for key, value in expected.items():
        first, second = (rank["model"][key] for rank in ranks)
        found = [first + second] if key.startswith("grad") else [first, second]
        for ours in found:
            assert (ours - value).float().norm() <= 1e-4 * value.float().norm(), key
