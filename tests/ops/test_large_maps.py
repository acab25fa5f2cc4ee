"""Kernels on a map of over 2^31 values, whose indices do not fit 32 bits."""

from typing import Any

import pytest
import torch

from tresnet.ops import epilogue as kernels
from tresnet.ops.epilogue import Epilogue, SEWeights


@pytest.mark.gpu
def test_repetitions_of_a_few_samples_have_their_results():
    shape = 4, 64, 56, 56
    copies = 2**31 // torch.Size(shape).numel() + 1
    need_bytes = 8 * 2 * copies * torch.Size(shape).numel()  # for eight maps in 16 bits
    if torch.cuda.mem_get_info()[0] < 1.2 * need_bytes:
        pytest.skip(f"needs {need_bytes >> 30} GiB of GPU memory")
    few = torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    se = SEWeights(*(torch.randn(n, device="cuda") / 8 for n in ((64, 64), (64,)) * 2))
    gamma, beta = torch.rand(2, 64, device="cuda") + 0.5
    epilogue = Epilogue(gamma, beta, slope=1e-3, se=se)
    expected: Any = None
    for count in (1, copies):
        x = torch.cat([few] * count)
        out, saved = kernels.forward(x, epilogue, saves=True)
        sums = kernels.gradient_sums(x, None, epilogue, saved, rebuilds=True)
        results: Any = out, sums.rebuilt, kernels.gradient(x, epilogue, saved, sums)
        expected = expected or results
        for part, definition in zip(results, expected, strict=True):
            for samples in part.split(4):
                torch.testing.assert_close(samples, definition, rtol=3e-2, atol=3e-2)
