import io
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision import transforms

from tresnet.data.decoding import EncodedImage
from tresnet.data.seeding import seed_cpu_generators
from tresnet.data.transforms import eval_sampler, eval_transform, train_sampler
from tresnet.errors import ConfigError
from tresnet.settings import Augment, EvalTransform, sides

PAPER = Augment(auto_augment="original")
PLAIN = Augment(random_crop=False, hflip=0)
DIGITS = replace(  # as the recipe digits has it
    PLAIN, affine_degrees=10, affine_translate=0.1, affine_scale=(0.9, 1.1), affine_shear=5
)


def train_transform(*args):
    """Training images as Pillow renders them, (3, H, W) in uint8."""
    sampler = train_sampler(*args)
    return lambda image: sampler(image).image()


@pytest.mark.parametrize("size", [None, 64])
def test_evaluation_is_by_default_timms(photo, size):
    ours = eval_transform(EvalTransform(input_size=size))(photo)
    wanted = {"input_size": 224, "crop_pct": 0.875} if size is None else {"input_size": size}
    theirs = create_transform(is_training=False, normalize=False, **{"crop_pct": 1.0, **wanted})
    assert ours.dtype == torch.uint8
    assert torch.equal(ours, theirs(photo))


@pytest.mark.parametrize("size", [(48, 96), (96, 48), (64, 64), (50, 51), (300, 33)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
def test_sizes_and_modes_equal_timms(photo, size, mode, filter_):
    for pct, image in itertools.product((1.0, 0.9, 0.57), (photo, photo.rotate(90, expand=True))):
        options = {"crop_pct": pct, "crop_mode": mode, "interpolation": filter_}
        ours = eval_transform(EvalTransform(input_size=size, **options))(image)
        black = {"mean": (0.0, 0.0, 0.0), "normalize": False}  # beyond a border
        theirs = create_transform(size, is_training=False, **black, **options)
        assert ours.shape == (3, *size)
        assert torch.equal(ours, theirs(image))


@pytest.mark.parametrize(
    ("cfg", "size"),
    [
        (PAPER, 40),
        (replace(PLAIN, random_crop=True, hflip=1.0), 32),
        (Augment(), 40),
        (Augment(auto_augment="rand-m9-mstd0.5"), (24, 40)),
        (Augment(auto_augment="3a"), 40),
        (DIGITS, 40),
        (replace(DIGITS, auto_augment="v0r-mstd0.5"), 40),
        (Augment(auto_augment="rand-m9-n3-inc1-mmax30"), 48),
        (Augment(auto_augment="rand-m4-tweights-mstd101"), 48),
        (Augment(auto_augment="augmix-m5-w4-d2"), 40),
    ],
)
def test_training_images_are_those_of_timm_and_torchvision(photo, cfg, size):
    """The same seed draws the same crop, flip, affine map and policy, which Pillow does."""
    photo.save(file := io.BytesIO(), "JPEG")
    encoded, photo = EncodedImage(file.getvalue(), "x"), Image.open(file)
    filter_ = "bicubic" if cfg.auto_augment == "3a" else "bilinear"
    ours, theirs = train_transform(cfg, size, filter_), reference(cfg, size, filter_)
    results = []
    for seed in range(40):
        seed_cpu_generators(seed)
        results.append(ours(encoded))
        seed_cpu_generators(seed)
        assert torch.equal(results[-1], theirs(photo)), seed
    assert results[0].shape == (3, *sides(size))
    assert len({result.sum().item() for result in results}) > 15


def reference(cfg, size, filter_):
    """The training transform of timm and torchvision, on Pillow's images."""
    timms = create_transform(
        size,
        is_training=True,
        scale=cfg.crop_scale,
        ratio=cfg.crop_ratio,
        hflip=cfg.hflip,
        color_jitter=None,
        auto_augment=cfg.auto_augment,
        interpolation=filter_,
        separate=True,
    )
    first, policy = timms[0].transforms, timms[1].transforms
    if not cfg.random_crop:
        first[0] = transforms.Resize(sides(size), transforms.InterpolationMode(filter_))
    if cfg.affine_degrees:
        first.append(
            transforms.RandomAffine(
                cfg.affine_degrees,
                (cfg.affine_translate, cfg.affine_translate),
                cfg.affine_scale,
                cfg.affine_shear,
                transforms.InterpolationMode.BILINEAR,
            )
        )
    return transforms.Compose([*first, *policy, transforms.PILToTensor()])


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 3), (400, 1)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_of_few_pixels_have_crops_with_pixels(size, interpolation):
    image = Image.new("RGB", size, (10, 20, 30))
    expected = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    transform = train_transform(Augment(crop_scale=(0.01, 1)), 8, interpolation)
    for seed in range(100):  # timm draws a width or height of 0 for some of them
        seed_cpu_generators(seed)
        assert torch.equal(transform(image), expected)
    for mode in ("center", "squash", "border"):
        cfg = EvalTransform(input_size=8, crop_mode=mode, interpolation=interpolation)
        assert eval_transform(cfg)(image).shape == (3, 8, 8)


def test_training_follows_from_the_seed_after_pickling_too(photo):
    sampler = train_sampler(replace(PAPER, affine_degrees=10), 40)
    copy = pickle.loads(pickle.dumps(sampler))
    for seed in range(10):
        seed_cpu_generators(seed)
        first = sampler(photo)
        seed_cpu_generators(seed)
        assert np.array_equal(copy(photo).row, first.row)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: train_sampler(Augment(), 0), "size of at least 1 pixel, got 0"),
        (lambda: train_sampler(Augment(hflip=1.5)), "--hflip: expected at most 1, got 1.5"),
        (
            lambda: train_sampler(Augment(crop_scale=(0.5, 0.1))),
            "expected the smallest value first, got",
        ),
        (lambda: train_sampler(Augment(auto_augment="best")), "a policy of timm.*'best'"),
        (lambda: eval_sampler(EvalTransform(crop_pct=87.5)), "--crop-pct: expected at most 1"),
    ],
)
def test_wrong_values_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("name", ["v0", "rand-m1-n15-p1.0"])
def test_posterize_to_zero_bits_is_black(name):
    """timm draws 0 bits for small magnitudes, which Pillow 13 refuses."""
    transform = train_transform(replace(PLAIN, auto_augment=name), 16)
    image = Image.new("RGB", (16, 16), (250, 130, 20))
    found = []
    for seed in range(60):
        seed_cpu_generators(seed)
        found.append(int(transform(image).max()))
    assert 0 in found
