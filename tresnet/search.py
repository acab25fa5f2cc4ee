"""Search for the largest number that satisfies a condition."""

from collections.abc import Callable


def find_edge(
    holds: Callable[[int], bool],
    start: int,
    *,
    stride: int = 1,
    multiple_of: int = 1,
    at_most: int = 2**20,
) -> int:
    """Return the largest multiple of `multiple_of`, up to `at_most`, for which `holds` is true.

    `holds` must be true up to some number and false above this number. The search goes up or down
    from `start` in strides that double, and then bisects. `holds` is called at most once for each
    number. `at_most` must be a multiple of `multiple_of`. If `holds` is never true, 0 is returned.
    """
    holding, failing = 0, at_most + multiple_of
    target, results = start, set()
    while failing - holding > multiple_of:
        lowest, highest = holding + multiple_of, failing - multiple_of
        n = min(max(target // multiple_of * multiple_of, lowest), highest)
        result = holds(n)
        holding, failing = (n, failing) if result else (holding, n)
        results.add(result)
        if len(results) == 2:
            target = (holding + failing) // 2
        else:
            target, stride = n + stride if result else n - stride, 2 * stride
    return holding
