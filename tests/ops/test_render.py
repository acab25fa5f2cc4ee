"""Kernels render what Pillow and timm compute, to the bit, over the range of each operation."""

import re
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ops.kernels import DEVICE
from tresnet.data.crops import RenderSpec
from tresnet.data.transforms import _EvalSampler
from tresnet.ops import render as rendering
from tresnet.ops import verdict
from tresnet.ops.launching import recorded_launches
from tresnet.ops.render import compare, kernels, launch, reference, runs_kernels
from tresnet.ops.render.rows import Op, make_row

pytest.importorskip("triton")
SIZE = (13, 22)
ROOT = Path(__file__).parents[2]


def picture(height, width, seed=0):
    """Smooth waves with noise, and full range: what policies do to both shows."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9), np.cos(y / 5), np.sin((x + y) / 7)], axis=-1)
    noise = np.random.default_rng(seed).uniform(-0.4, 0.4, waves.shape)
    return ((waves + noise).clip(-1, 1) * 127.5 + 127.5).astype(np.uint8)


def rendered(crops, rows, size, bicubic=False):
    """What Pillow and what the kernels make of crops."""
    begins = np.cumsum([0, *(crop.size for crop in crops)])
    count = max(map(len, rows))
    table = torch.tensor(np.stack([np.pad(row, (0, count - len(row))) for row in rows]))
    table[:, 0] = torch.tensor(begins[:-1])
    arena = torch.from_numpy(np.concatenate([crop.ravel() for crop in crops]))
    expected = reference.render(arena, table, size, bicubic)
    return expected, launch.render(arena.to(DEVICE), table, size, bicubic).cpu()


@pytest.mark.parametrize("mode", ["center", "border", "squash"])
def test_the_part_of_a_thin_picture_is_pillows(mode, monkeypatch):
    """Compare with the part of the complete picture, which Pillow resizes."""
    whole, part = reference.resize, Mock(wraps=reference._resized_part)
    monkeypatch.setattr(reference, "_resized_part", part)
    monkeypatch.setattr(reference, "_LARGE", 0)
    shapes = [(1, 90), (2, 131), (3, 50), (90, 1), (170, 3), (7, 300), (1, 1), (40, 31), (999, 2)]
    for number, shape in enumerate(shapes):
        for size in ((13, 22), (16, 16), (33, 7)):
            bicubic = number % 2 == 0
            sampler = _EvalSampler(RenderSpec(size, bicubic), mode, 0.875)
            columns, rows = sampler.resized(*shape[::-1])
            window = (rows - size[0]) // 2, (columns - size[1]) // 3
            row = make_row(shape, (rows, columns), window, flip=number % 3 == 0)
            crop = picture(*shape, number)
            found = np.asarray(whole(crop, row, size, bicubic))
            with monkeypatch.context() as patch:
                patch.setattr(reference, "_LARGE", 1e9)
                expected = np.asarray(whole(crop, row, size, bicubic))
            np.testing.assert_array_equal(found, expected)
    assert part.call_count == 3 * len(shapes)


def test_a_thin_picture_takes_little_memory():
    """As a whole, it would have 2.3 thousand million pixels."""
    sampler = _EvalSampler(RenderSpec((224, 224), False), "center", 0.875)
    image = Image.new("RGB", (1, 40_000), (9, 200, 77))
    tracemalloc.start()
    pixels = sampler(image).image()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pixels.flatten(1).unique(dim=1).flatten().tolist() == [9, 200, 77]
    assert peak < 2**24


@pytest.mark.parametrize("bicubic", [False, True])
def test_crops_of_all_sizes_are_resized_and_flipped(bicubic):
    shapes = [
        (40, 61), (7, 5), (13, 22), (1, 1), (1, 90), (100, 1), (60, 23), (26, 44), (12, 40), (90, 9)
    ]  # fmt: skip
    crops = [picture(*shape, seed) for seed, shape in enumerate(shapes)]
    rows = [make_row(shape, SIZE, flip=i % 3 == 1) for i, shape in enumerate(shapes)]
    assert {row[8] for row in rows} == {0, 1} or int(Image.__version__.split(".")[0]) < 13
    expected, found = rendered(crops, rows, SIZE, bicubic)
    for crop, row, image in zip(crops, rows, expected, strict=True):
        filter_ = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        resized = np.asarray(Image.fromarray(crop).resize(SIZE[::-1], filter_))
        np.testing.assert_array_equal(image, resized[:, ::-1] if row[7] else resized)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bicubic", [False, True])
def test_a_window_of_the_resized_crop_is_pillows_crop_with_black_beyond(bicubic):
    cases = [((30, 41), (19, 26), (3, 2)), ((9, 14), (8, 30), (-2, 4)), ((50, 8), (20, 9), (4, -6))]
    crops = [picture(*shape) for shape, _, _ in cases]
    rows = [make_row(*case) for case in cases]
    expected, found = rendered(crops, rows, SIZE, bicubic)
    assert (expected[1, :2] == 0).all()
    assert torch.equal(found, expected)


# op: arguments over the range of magnitudes, beyond the usual ends too
FACTORS = [(value,) for value in (0.0, 0.1, 0.46, 0.73, 1.0, 1.27, 1.9, 3.1)]
AFFINE = [
    *((1, shear, 0, 0, 1, 0) for shear in (-0.3, -0.017, 0.3, 0.9)),
    *((1, 0, 0, shear, 1, 0) for shear in (-0.3, 0.011, 0.3)),
    *((1, 0, shift, 0, 1, 0) for shift in (-9.9, 0.5, 1, 3.3, 40)),
    *((1, 0, 0, 0, 1, shift) for shift in (-5.85, 0.25, 2)),
    (0.5, 0.1, 0, 0.2, 0.7, 3), (-1, 0, 22, 0, -1, 13),
]  # fmt: skip
CASES = {
    Op.COLOR: FACTORS, Op.SHARPNESS: FACTORS, Op.BRIGHTNESS: FACTORS, Op.CONTRAST: FACTORS,
    Op.AUTOCONTRAST: [()], Op.EQUALIZE: [()], Op.INVERT: [()],
    Op.POSTERIZE: [(bits,) for bits in range(9)],
    Op.SOLARIZE: [(limit,) for limit in (0, 1, 100, 128, 255, 256)],
    Op.SOLARIZE_ADD: [(add, 128) for add in (0, 1, 50, 110, 128)],
    Op.BLUR: [(deviation,) for deviation in (0.1, 0.5, 0.77, 1.0, 1.4142, 1.5, 2.0, 3.0, 9.0)],
    Op.AFFINE: [(*m, 124, 116, 104, bicubic) for m in AFFINE for bicubic in (0, 1)],
}  # fmt: skip
IMAGES = {
    "photograph": picture(*SIZE),
    "dark": picture(*SIZE) // 4 + 9,
    "one colour": np.full((*SIZE, 3), (7, 200, 0), np.uint8),
    "two values": (picture(*SIZE) > 127).astype(np.uint8) * 3 + 60,
}


@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name.lower())
def test_an_operation_is_pillows_over_its_range(op):
    images = [IMAGES["photograph"]] if op == Op.AFFINE else IMAGES.values()
    cases = [(image, values) for image in images for values in CASES[op]]
    rows = [make_row(SIZE, SIZE, layers=[(op, *values)]) for _, values in cases]
    expected, found = rendered([image for image, _ in cases], rows, SIZE)
    assert torch.equal(found, expected)


def test_layers_follow_each_other():
    layers = [
        [(Op.COLOR, 0.3), (Op.AFFINE, 1, 0.2, 0, 0, 1, 0, 9, 8, 7, 0)],
        [(Op.NONE,), (Op.EQUALIZE,)],
        [(Op.BLUR, 1.2), (Op.SHARPNESS, 1.8)],
        [],
    ]
    rows = [make_row((30, 40), SIZE, layers=each, flip=True, count=2) for each in layers]
    expected, found = rendered([picture(30, 40, seed) for seed in range(4)], rows, SIZE)
    assert torch.equal(found, expected)


def test_kernels_that_differ_or_cannot_be_compiled_are_not_used(monkeypatch, caplog):
    """The comparison has every operation, so a fault in any of them is noticed."""
    compare(torch.device(DEVICE))
    monkeypatch.setattr(rendering, "obstacle", lambda device, dtype: None)
    run = launch.render

    def wrong(pixels, rows, size, bicubic):
        images = run(pixels, rows, size, bicubic)
        images[4] += 1
        return images

    for fault, reason in (
        (wrong, r"images \[4\] differ"),
        (Mock(side_effect=OSError("x")), r"OSError: x"),
    ):
        monkeypatch.setattr(launch, "render", fault)
        monkeypatch.setattr(verdict, "_verdicts", {})
        judged = verdict.verdict("render", torch.device(DEVICE), partial(compare, DEVICE))
        monkeypatch.setattr(rendering, "verdict", lambda *_, judged=judged: judged)
        runs_kernels.cache_clear()
        assert not runs_kernels(torch.device("cuda", 7))
        assert not runs_kernels(torch.device("cuda", 7))
        assert len(re.findall(reason, caplog.text)) == 1
    runs_kernels.cache_clear()


@pytest.mark.gpu
def test_kernels_are_pillow_on_this_gpu():
    compare(torch.device("cuda"))
    assert runs_kernels(torch.device("cuda"))


def batch(device="meta"):
    """Crops of ImageNet's mean size in a batch of 256, which a policy of two operations changes."""
    layers = [(Op.EQUALIZE,), (Op.AFFINE, 1, 0.1, 0, 0, 1, 0, 124, 116, 104, 0)]
    row = make_row((375, 262), (224, 224), flip=True, layers=layers)
    rows = np.stack([row] * 256)
    pixels = torch.empty(256 * 3 * 375 * 262, dtype=torch.uint8, device=device)
    return pixels, torch.from_numpy(rows), (224, 224)


def test_a_batch_takes_few_launches_and_bytes():
    with recorded_launches() as launches:
        launch.render(*batch(), bicubic=False)
    names = [one.kernel.__name__ for one in launches]
    assert names == ["weights", "resize", "tables", "layer", "layer"]
    moved = sum(
        value.nbytes
        for one in launches
        for value in one.arguments.values()
        if isinstance(value, torch.Tensor)
    )
    assert moved / 256 < 1.5e6


class Kernel:
    """Stand-in for a function of triton.jit that counts Triton's searches for compiled kernels."""

    def __init__(self, kernel):
        self.fn, self.arg_names, self.searches = kernel.fn, kernel.arg_names, 0

    def __getitem__(self, grid):
        def search(**_):
            self.searches += 1
            return MagicMock()

        return search


def test_batches_of_other_sizes_launch_the_same_compiled_kernels(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    stand_ins = {}
    for name in ("weights", "resize", "tables", "layer", "blur"):
        stand_ins[name] = Kernel(getattr(kernels, name))
        monkeypatch.setattr(kernels, name, stand_ins[name])
    layers = [(Op.EQUALIZE,), (Op.BLUR, 1.0)]
    for count, shape, size in (
        (2, (20, 30), (8, 12)),
        (3, (90, 31), (16, 16)),
        (1, (9, 9), (4, 5)),
    ):
        row = make_row(shape, size, layers=layers)
        pixels = torch.zeros(count * 3 * shape[0] * shape[1], dtype=torch.uint8)
        launch.render(pixels, torch.from_numpy(np.stack([row] * count)), size, bicubic=False)
    searches = {name: each.searches for name, each in stand_ins.items()}
    assert searches == {"weights": 1, "resize": 1, "tables": 1, "layer": 1, "blur": 2}


COMPILE = """
import sys
from benchmarks.kernel_table import compile_for, compiled, resources
compile_for(int(sys.argv[1]))
from tests.ops.test_render import batch
from tresnet.ops.launching import recorded_launches
from tresnet.ops.render import launch
from tresnet.ops.render.rows import LAYERS, Op
pixels, rows, size = batch()
with recorded_launches() as launches:
    launch.render(pixels, rows, size, bicubic=True)
    rows[:, LAYERS] = Op.BLUR
    launch.render(pixels, rows, size, bicubic=False)
kernels = {kernel.hash: kernel for kernel in map(compiled, launches)}
for kernel in kernels.values():
    assert resources(kernel)["stack"] == 0, kernel.name
    assert "fma.rn.f" not in kernel.asm["ptx"], kernel.name
print(len(kernels))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_without_spills_and_without_fused_multiply_add(capability):
    command = [sys.executable, "-c", COMPILE, capability]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) == 7  # of weights and blurs, there are two
