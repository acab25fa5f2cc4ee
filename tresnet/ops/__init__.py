"""Tensor operations: each is defined in plain PyTorch, with faster forms beside the definition.

An operation is a folder; with kernels it has four files:

| file | holds |
|---|---|
| `__init__.py` | the function: checks its arguments and picks the implementation |
| `reference.py` | the definition in plain PyTorch |
| `kernels.py` | Triton kernels; only `launching.py` imports triton too |
| `launch.py` | a function for each launch, of the name and arguments of its definition |

None has a gradient of its own: autograd differentiates the definitions, and `tresnet.fused` calls
forward and backward. The common pattern, for a function `double` of a tensor (`tiles`
divides maps into programs):

    # __init__.py
    def double(x: Tensor, *, kernels: bool) -> Tensor:
        return (launch if kernels else reference).double(tiles.dense(x))

    # launch.py
    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(_double(x, None), x=x, out=out)  # launching.py; the names are the kernel's
        return out

    @by_form  # tiles: once for each shape, strides and dtype
    def _double(x: Tensor, processors: int) -> Form:
        grid = (-(-x.numel() // BLOCK),)
        return Form("double.double", WARPS, grid, N=x.numel(), BLOCK=BLOCK)

`selfcheck.check` runs all kernels on a GPU before their first use there: a new one is added to it.
`tests/ops/test_abn_kernels.py` is a test to copy. `benchmarks/ops.py` times what it lists;
`tests/ops/compile_kernels.py` compiles what it lists, to count registers.
"""
