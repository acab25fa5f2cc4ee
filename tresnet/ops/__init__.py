"""Tensor operations, each defined in plain PyTorch (`render`: by Pillow); some have Triton kernels.

No operation defines an `autograd.Function`: autograd differentiates the plain definitions. The
kernels of `epilogue` run in `tresnet.fused.stage`: `forward_block` calls `forward`, and `Backward`
calls `gradient_sums` and `gradient`. `pool.py` with `pool_kernels.py` is a short example of an
operation with kernels. Only files of kernels import triton, and `LaunchSpec` imports these by name.

`tests/ops/test_epilogue.py` and `test_pool.py` compare kernels with their definitions.
`tests/ops/compile_kernels.py` counts their registers, `benchmarks/ops.py` times them, and
`tresnet.ops.verdict` holds what their comparisons at the first use on a GPU have found.
"""
