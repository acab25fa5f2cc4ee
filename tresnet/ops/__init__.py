"""Tensor operations, each defined in plain PyTorch (`render`: by Pillow); some have Triton kernels.

An operation with kernels has a folder with at least these files:

| file | holds |
|---|---|
| `__init__.py` | the public functions, which check their arguments |
| `reference.py` | the definition in plain PyTorch |
| `kernels.py` | the Triton kernels; only files of kernels import triton |
| `launch.py` | the functions that launch the kernels |

No operation defines an `autograd.Function`. Autograd differentiates the plain definitions. The
kernels of `abn` run in `tresnet.fused.stage.StageFunction`, whose backward calls `gradient_sums`
and `gradient`. This example adds the operation `double`:

    # __init__.py
    def double(x: Tensor, *, kernels: bool) -> Tensor:
        return (launch if kernels else reference).double(tiles.dense(x))

    # launch.py
    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(_double(x), x=x, out=out)  # from launching.py; takes the kernel's tensors
        return out

    @cached_per_layout  # from tiles: caches a spec for each layout of x and further arguments
    def _double(x: Tensor) -> LaunchSpec:
        grid = (-(-x.numel() // BLOCK),)
        return LaunchSpec("double.kernels.double", WARPS, grid, N=x.numel(), BLOCK=BLOCK)

To test the new operation, copy a test of `tests/ops/test_abn_kernels.py`. List the new kernel in
`benchmarks/ops.py` to time it, and in `tests/ops/compile_kernels.py` to count its registers. Add
the operation to `tresnet.fused.first_use`, which checks kernels before their first use on a GPU.
"""
