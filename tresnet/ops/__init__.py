"""Tensor operations, each defined in plain PyTorch (`render`: by Pillow); some have Triton kernels.

No operation defines an `autograd.Function`: autograd differentiates the plain definitions. The
kernels of `epilogue` run in `tresnet.fused.stage.StageFunction`, whose backward calls
`gradient_sums` and `gradient`. `stem.py` with `stem_kernel.py` is the shortest example of an
operation with a kernel. Only files of kernels import triton, when a kernel is launched.

`tests/ops/test_epilogue.py` and `test_stem.py` compare kernels with their definitions.
`tests/ops/compile_kernels.py` counts their registers, `benchmarks/ops.py` times them, and
`tresnet.fused.first_use` checks them before their first use on a GPU.
"""
