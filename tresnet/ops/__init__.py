"""Tensor operations: each defined in plain PyTorch, with gradients and faster forms beside.

An operation is a folder; with kernels and a gradient of its own it has five files:

| file | holds |
|---|---|
| `__init__.py` | the function: checks what it gets and picks the implementation |
| `reference.py` | the definition in plain PyTorch |
| `kernels.py` | Triton kernels; no other file imports triton |
| `launch.py` | a function for each launch |
| `autograd.py` | its `torch.autograd.Function` |

What is alike in all of them, for a function `double` of a tensor (`tiles` cuts maps into programs):

    # __init__.py
    def double(x: Tensor, *, impl: Impl = "auto") -> Tensor:
        check_impl("double", impl)  # dispatch.py
        if runs_kernels(x, impl):  # dispatch.py: not under a compiler, in float64, on a CPU, ...
            return autograd.Double.apply(tiles.dense(x))
        return reference.double(x)

    # launch.py
    @operator(torch.empty_like)  # operators.py: tresnet::double_forward, and its result when faked
    def forward(x: Tensor) -> Tensor:
        out, grid = torch.empty_like(x), (-(-x.numel() // BLOCK), 1, 1)
        launch(_kernels().forward, grid, WARPS, (x, out), (x.numel(), BLOCK))  # operators.py
        return out

    @functools.cache
    def _kernels() -> Any:  # at the first launch: Triton may be absent, and is slow to import
        from tresnet.ops.double import kernels

        return kernels

    # autograd.py, in backward: the definition where the gradient is to be differentiated again
    if twice.wanted():
        return twice.gradients(reference.double, [x], [True], grad)[0]
    return launch.backward(tiles.dense(grad, like=x), x)

`selfcheck.check` runs all kernels on a GPU before their first use there: a new one is added to it.
`tests/ops/test_blur_kernels.py` is a test to copy. `bench ops` times what `measure/operations.py`
lists; `tests/ops/compile_kernels.py` compiles what it lists, to count registers.
"""
