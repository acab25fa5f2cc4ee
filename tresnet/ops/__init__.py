"""Tensor operations, each defined in plain PyTorch; some also have faster Triton kernels.

Most operations have a folder. A folder with kernels has four files:

| file | holds |
|---|---|
| `__init__.py` | the public function: checks its arguments and picks the implementation |
| `reference.py` | the definition in plain PyTorch |
| `kernels.py` | the Triton kernels; only these files and `launching.py` import triton |
| `launch.py` | the functions of `reference.py`, computed by the kernels |

No operation defines an `autograd.Function`. Autograd differentiates the plain definitions, but not
the kernels, so the `autograd.Function` of `tresnet.fused` calls `gradient_sums` and `gradient` of
`abn`. This example adds the operation `double`:

    # __init__.py
    def double(x: Tensor, *, kernels: bool) -> Tensor:
        return (launch if kernels else reference).double(tiles.dense(x))

    # launch.py
    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(_double(x), x=x, out=out)  # from launching.py; takes the kernel's tensors
        return out

    @cached_per_layout  # caches the spec by the layout of x and by further arguments; see tiles
    def _double(x: Tensor) -> LaunchSpec:
        grid = (-(-x.numel() // BLOCK),)
        return LaunchSpec("double.kernels.double", WARPS, grid, N=x.numel(), BLOCK=BLOCK)

For the test of a new operation, copy one from `tests/ops/test_abn_kernels.py`. List the new kernel
in `benchmarks/ops.py` to time it, and in `tests/ops/compile_kernels.py` to count its registers.
On a new GPU, `tresnet.fused.compare` compares the functions of `abn` with their definitions.
"""
