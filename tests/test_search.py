"""Compare `find_edge` with counting up."""

import pytest

from tresnet.search import find_edge


@pytest.mark.parametrize("edge", [0, 1, 15, 17, 100, 1000])
@pytest.mark.parametrize("start", [-5, 0, 1, 5, 16, 17, 18, 90, 3000])
@pytest.mark.parametrize(
    "options", [{}, {"multiple_of": 4, "stride": 7, "at_most": 64}, {"at_most": 12}]
)
def test_the_largest_number_is_found_and_none_tried_twice(edge, start, options):
    tried = []
    largest = find_edge(lambda n: tried.append(n) or n <= edge, start, **options)
    step, most = options.get("multiple_of", 1), options.get("at_most", 2**20)
    assert largest == max(n for n in range(0, min(edge, most) + 1, step))
    assert len(set(tried)) == len(tried) <= 2 * max(abs(edge - start), 1).bit_length() + 2
    assert all(0 < n <= most and n % step == 0 for n in tried)
