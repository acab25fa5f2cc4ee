import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from tresnet.data.seeding import seed_cpu_generators
from tresnet.data.transforms import Augment, eval_transform, train_transform
from tresnet.errors import ConfigError
from tresnet.settings import EvalTransform, sides

NO_NORM = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
PAPER = Augment(auto_augment="original", cutout_prob=0.5)
PLAIN = Augment(random_crop=False, hflip=0)
DIGITS = replace(  # as the recipe digits has it
    PLAIN, affine_degrees=10, affine_translate=0.1, affine_scale=(0.9, 1.1), affine_shear=5
)


@pytest.mark.parametrize("size", [None, 64])
def test_evaluation_is_by_default_timms(photo, size):
    ours = eval_transform(EvalTransform(input_size=size))(photo)
    wanted = {"input_size": 224, "crop_pct": 0.875} if size is None else {"input_size": size}
    theirs = create_transform(is_training=False, **NO_NORM, **{"crop_pct": 1.0, **wanted})(photo)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [(48, 96), (96, 48), (64, 64), (50, 51), (300, 33)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
def test_sizes_and_modes_equal_timms(photo, size, mode, filter_):
    for pct, image in itertools.product((1.0, 0.9, 0.57), (photo, photo.rotate(90, expand=True))):
        options = {"crop_pct": pct, "crop_mode": mode, "interpolation": filter_}
        ours = eval_transform(EvalTransform(input_size=size, **options), dtype=torch.uint8)(image)
        theirs = create_transform(size, is_training=False, **NO_NORM, normalize=False, **options)
        assert ours.shape == (3, *size)
        assert torch.equal(ours, theirs(image))


def test_uint8_and_float32_are_the_same_picture(photo):
    for build, cfg in ((eval_transform, EvalTransform(input_size=32)), (train_transform, PAPER)):
        seed_cpu_generators(1)
        as_float = build(cfg)(photo)
        seed_cpu_generators(1)
        as_bytes = build(cfg, dtype=torch.uint8)(photo)
        assert as_bytes.dtype == torch.uint8
        assert torch.equal(as_bytes.float() / 255, as_float)


@pytest.mark.parametrize(
    ("cfg", "size"),
    [
        (PAPER, 40),
        (Augment(auto_augment="rand-m9-mstd0.5"), (24, 40)),
        (Augment(auto_augment="3a", cutout_prob=1.0), 40),
        (Augment(cutout_prob=1.0, cutout_area=(0.02, 0.33), cutout_min_aspect=0.3), (24, 40)),
        (DIGITS, 40),
    ],
)
def test_training_stays_in_zero_to_one(photo, cfg, size):
    transform = train_transform(cfg, size, "bicubic" if cfg.auto_augment == "3a" else "bilinear")
    extreme = Image.fromarray((np.asarray(photo) > 127).astype(np.uint8) * 255)
    results = []
    for seed in range(25):
        seed_cpu_generators(seed)
        result = transform(extreme)
        assert result.shape == (3, *sides(size))
        assert result.dtype == torch.float32
        assert 0 <= result.min() <= result.max() <= 1
        results.append(result)
    assert len({result.sum().item() for result in results}) > 15


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 3), (400, 1)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_of_few_pixels_have_crops_with_pixels(size, interpolation):
    image = Image.new("RGB", size, (10, 20, 30))
    expected = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    transform = train_transform(Augment(crop_scale=(0.01, 1)), 8, interpolation, dtype=torch.uint8)
    for seed in range(100):  # timm draws a width or height of 0 for some of them
        seed_cpu_generators(seed)
        assert torch.equal(transform(image), expected)
    for mode in ("center", "squash", "border"):
        cfg = EvalTransform(input_size=8, crop_mode=mode, interpolation=interpolation)
        assert eval_transform(cfg)(image).shape == (3, 8, 8)


def test_training_follows_from_the_seed_after_pickling_too(photo):
    transform = train_transform(replace(PAPER, affine_degrees=10), 40)
    copy = pickle.loads(pickle.dumps(transform))
    for seed in range(10):
        seed_cpu_generators(seed)
        first = transform(photo)
        seed_cpu_generators(seed)
        assert torch.equal(copy(photo), first)


def test_without_augmentation_training_is_a_squash(photo):
    expected = eval_transform(EvalTransform(input_size=32, crop_mode="squash"))(photo)
    levels = (train_transform(PLAIN, 32)(photo) - expected).abs() * 255
    assert levels.max() < 1.01  # torchvision's resize rounds otherwise than Pillow's


def test_cutout_blackens_a_quarter_of_the_image_half_the_time():
    white = Image.new("RGB", (32, 32), (255, 255, 255))
    transform = train_transform(replace(PLAIN, cutout_prob=0.5), 32)
    seed_cpu_generators(0)
    black = [1 - transform(white).mean().item() for _ in range(200)]
    assert set(black) == {0.0, 0.25}
    # 200 fair draws: the standard deviation of the share is 0.035.
    assert 0.35 < sum(share > 0 for share in black) / 200 < 0.65


def test_auto_augment_uncovers_grey_not_black():
    white = Image.new("RGB", (32, 32), (255, 255, 255))
    # ImageNet's mean colour, which timm fills with, is (124, 116, 104) / 255.
    transform = train_transform(
        replace(PLAIN, auto_augment="rand-m9-n1-inc0"), 32, dtype=torch.uint8
    )
    seed_cpu_generators(0)
    colours = {tuple(transform(white)[:, 0, 0].tolist()) for _ in range(200)}
    assert (124, 116, 104) in colours


def test_mirror_and_digits():
    left = Image.new("RGB", (32, 32))
    left.paste((255, 255, 255), (0, 0, 16, 32))
    mirrored = train_transform(replace(PLAIN, hflip=1.0), 32)(left)
    assert mirrored[:, :, 16:].min() == 1
    assert mirrored[:, :, :16].max() == 0
    digit = train_transform(DIGITS, 32)
    seed_cpu_generators(0)
    # The left half stays on the left, however it is shifted, turned and zoomed.
    for _ in range(50):
        image = digit(left)
        assert image[:, :, :16].mean() > image[:, :, 16:].mean() + 0.4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: train_transform(Augment(), 0), "size of at least 1 pixel, got 0"),
        (lambda: train_transform(Augment(hflip=1.5)), "--hflip: expected at most 1, got 1.5"),
        (
            lambda: train_transform(Augment(crop_scale=(0.5, 0.1))),
            "expected the smallest value first, got",
        ),
        (lambda: train_transform(Augment(auto_augment="best")), "a policy of timm.*'best'"),
        (lambda: eval_transform(EvalTransform(crop_pct=87.5)), "--crop-pct: expected at most 1"),
        (lambda: eval_transform(EvalTransform(), dtype=torch.float16), "torch.uint8, got torch.f"),
    ],
)
def test_wrong_values_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_crops_of_any_size_have_one_layout_in_memory():
    """Otherwise workers could not join them to a batch."""
    transform = train_transform(Augment(crop_scale=(1.0, 1.0)), 8, dtype=torch.uint8)
    images = [transform(Image.new("RGB", sides, (7, 8, 9))) for sides in ((4, 3), (1, 5), (1, 1))]
    assert len({image.stride() for image in images}) == 1
    assert all(torch.equal(image, images[0]) for image in images)
