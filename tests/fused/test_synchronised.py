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
from tresnet.fused import padding
from tresnet.layers.norm import ABN

WORLD_SIZE = 2
WIDTH_FACTOR = 0.3  # 19 channels


def half(rank: int, folder: str) -> None:
    """One process: forward and backward on its images, the results written to a file."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    padding.FROM = 1  # the process without images does not pad, the other does
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    images, results = torch.load(f"{folder}/images.pt"), {}
    results["model"] = step(rank, network(), images)
    results["mixed"] = mixed_step(rank, images)
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
    torch.manual_seed(1)  # of 0, one value is 9e-7 off the kink of its activation
    images = torch.rand(2, 3, 32, 32)
    torch.save(images, tmp_path / "images.pt")
    mp.start_processes(half, (str(tmp_path),), nprocs=WORLD_SIZE, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
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
