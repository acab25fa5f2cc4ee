"""Check the divisors and number types that launches promise to Triton, which trusts them."""

import itertools
from types import NoneType

import pytest
import torch

from tests.ops.kernels import LAYOUTS
from tests.ops.operation import launch_all, meta
from tresnet.ops.launching import recorded_launches
from tresnet.ops.space_to_depth import launch as stem

SHAPES = [
    *((3, 5, 7, 4), (2, 12, 7, 5), (2, 64, 7, 7), (1, 83, 9, 11), (4, 76, 14, 14), (2, 24, 8, 6)),
    *((2, 3, 2, 2), (2, 48, 2, 3), (1, 8, 3, 5), (5, 1, 4, 4), (2, 2048, 7, 7), (256, 64, 56, 56)),
]
INTEGERS = {"eps": 1, "slope": 1}  # which the compiler must not see as such
CHAINS = [
    *({"blur": blur, "se": se, "join": False} for blur in (False, True) for se in (False, True)),
    *({"slope": None, "se": se, "join": True} for se in (False, True)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_are_multiples_of_what_the_compiler_is_told(shape, dtype, layout):
    seen = set()
    for chain, offset in itertools.product(CHAINS, (0, 1)):
        n, c, h, w = shape
        x = meta(*((n, h, w, c) if layout == "nhwc" else shape), dtype=dtype, offset=offset)
        x = x.permute(0, 3, 1, 2) if layout == "nhwc" else x
        with recorded_launches() as launches:
            launch_all(x, **{**INTEGERS, **chain}, offset=1)
        for one in launches:
            arguments = one.arguments
            for name in {"eps", "slope", "count"} & set(arguments):
                assert type(arguments[name]) in (float, NoneType), (one.kernel.__name__, name)
            if "AP" not in arguments:
                continue
            seen.add(one.kernel.__name__)
            ap, ac = arguments["AP"], arguments["AC"]
            divisors = {"P": ap, "C": ac, "chunk": ap}
            for map_name in "xo":
                divisors |= dict(
                    zip((f"{map_name}{axis}" for axis in "npc"), (ap * ac, ac, ap), strict=True)
                )
            for name in divisors.keys() & arguments.keys():
                assert arguments[name] % divisors[name] == 0, (one.kernel.__name__, name, arguments)
    both = {"squeeze", "apply", "grad_sums", "grad_apply"}
    assert seen == {"moments", *both, *(f"{name}_blurred" for name in both)}


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("crop", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stems_strides_are_multiples_of_its_run(channels, crop, layout):
    images = torch.empty(4, channels, 16, 16 + crop, dtype=torch.uint8)
    x = images.to(memory_format=LAYOUTS[layout])[1:, :, :, crop:]
    with recorded_launches() as launches:
        stem.stem_input(x, 4, torch.float32)
    (one,) = launches
    arguments = one.arguments
    if run := arguments["RUN"]:
        assert arguments["C"] == 1 or arguments["xc"] == 1
        assert arguments["xw"] == arguments["C"]
        assert all(
            number % run == 0 for number in (arguments["xn"], arguments["xh"], 4 * arguments["C"])
        )
    assert bool(run) == (layout == "nhwc" or channels == 1)
