"""Test the error messages of layers for sizes, dtypes and tools that they cannot use."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.toys import NEEDS_PACKAGE
from tresnet.errors import InputError
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.norm import InplaceABN
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

GROUPED = GroupedLinear(4, (1, 2, 3))
PARALLEL = ParallelBottleneck(3, 8, shared_input=False)
CONV = nn.Conv2d(8, 8, 3, padding=1, bias=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            (lambda sizes=sizes: GroupedLinear(*sizes), "at least one output for each group")
            for sizes in ((0, (1,)), (4, ()), (4, (2, 0)), (4, (2, -1)))
        ),
        (lambda: GROUPED(torch.zeros(2, 8)), r"\(N, 12\) or \(N, 3, 4\), got \(2, 8\)"),
        *(
            (lambda sizes=sizes: ParallelBottleneck(*sizes), "channels divisible by reduction")
            for sizes in ((0, 8), (2, 0), (2, 9))
        ),
        (lambda: PARALLEL(torch.zeros(1, 8, 4, 4)), "expected 24 channels, got 8"),
        (lambda: SubtractedConv(3, 5, 3), "even out_channels.*got 5"),
        (lambda: SubtractedConv(3, 4, 2), "odd kernel_size.*got 2"),
        (lambda: SubtractedConv(0, 4, 3), "in_channels of at least 1, got 0"),
        (lambda: SubtractedConv(3, 4, 3, 0), "a stride of at least 1, got 0"),
        (lambda: SubtractedConv(3, 4, 3, mode="fast"), "branches, composed, recompute, got 'fast'"),
        (lambda: SubtractedConv(3, 4, 3)(torch.zeros(1, 4, 5, 5)), r"\(N, 3, H, W\), got \(1, 4, "),
        (lambda: SubtractedConv.replace_in(CONV), "inside Conv2d"),
        (lambda: SubtractedConv.replace_in(nn.Sequential(CONV), mode="most"), "got 'most'"),
    ],
)
def test_what_is_impossible_is_refused(wrong: Callable[[], object], message: str):
    with pytest.raises(InputError, match=message):
        wrong()


def test_the_smallest_sizes_are_accepted():
    assert GroupedLinear(1, (1,))(torch.ones(2, 1)).shape == (2, 1)
    assert ParallelBottleneck(1, 1, reduction=1)(torch.ones(2, 1, 1, 1)).shape == (2, 1, 1, 1)


@NEEDS_PACKAGE
@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", torch.bfloat16, "no bfloat16 kernels for a cuda device: use float16, or"),
        ("cpu", torch.bfloat16, "no 16-bit kernels for a cpu device: use float32, or norm='abn'"),
        ("cpu", torch.float16, "no 16-bit kernels for a cpu device: use float32, or norm='abn'"),
    ],
)
def test_in_place_abn_refuses_dtypes_without_kernels(device: str, dtype: torch.dtype, message: str):
    norm = InplaceABN(2).eval()
    with FakeTensorMode(), pytest.raises(InputError, match=message):
        norm(torch.empty(1, 2, 3, 3, device=device, dtype=dtype))
