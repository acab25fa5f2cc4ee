"""Crops of photographs, decoded in part, are Pillow's; odd files go to Pillow or are named."""

import io
import random
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.loaders import write_jpegs
from tresnet.data import decoding
from tresnet.data.decoding import BadImageError, EncodedImage

linux = pytest.mark.skipif(sys.platform != "linux", reason="nvImageCodec has no wheel here")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_jpegs(root, "train", count=8)
    return [file.read_bytes() for file in sorted((root / "train").rglob("*.jpg"))]


@pytest.fixture
def decoded_in_part(monkeypatch):
    """Return the results of nvImageCodec in order: True for a crop, False for none."""
    calls = []
    decode = decoding._decode_region

    def spy(data, box):
        pixels = decode(data, box)
        calls.append(pixels is not None)
        return pixels

    monkeypatch.setattr(decoding, "_decode_region", spy)
    return calls


def pillow(data):
    """(H, W, 3) as torchvision's loader decodes it, or None where Pillow refuses."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:
        return None


def encode(image, **options):
    file = io.BytesIO()
    image.save(file, options.pop("format", "JPEG"), **options)
    return file.getvalue()


def boxes(width, height, count):
    """Random ones, the whole image, its last pixel, and its first column."""
    draw = random.Random(0)
    yield from ((0, 0, height, width), (height - 1, width - 1, 1, 1), (0, 0, height, 1))
    for _ in range(count):
        top, left = draw.randrange(height), draw.randrange(width)
        yield top, left, draw.randint(1, height - top), draw.randint(1, width - left)


def assert_crops_are_pillows(data, count):
    image = pillow(data)
    for top, left, height, width in boxes(image.shape[1], image.shape[0], count):
        crop = EncodedImage(data, "x").crop((top, left, height, width))
        expected = image[top : top + height, left : left + width]
        np.testing.assert_array_equal(crop.numpy(), expected)


@linux
def test_every_crop_of_a_photograph_is_pillows(photos, decoded_in_part):
    for data in photos:
        assert_crops_are_pillows(data, 12)
    assert decoded_in_part == [True] * 15 * len(photos)


def exif_turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


# name: what is saved of the photograph; whether its crops are decoded in part
ODD = {
    "4:4:4": (lambda im: encode(im, subsampling=0), True),
    "4:2:2": (lambda im: encode(im, subsampling=1), True),
    "RGB inside": (lambda im: encode(im, keep_rgb=True), True),
    "restarts": (lambda im: encode(im, restart_marker_blocks=7), True),
    "odd sides": (lambda im: encode(im.resize((333, 211))), True),
    "one pixel": (lambda im: encode(im.resize((1, 1))), True),
    "EXIF": (lambda im: encode(im, exif=exif_turned()), True),
    "progressive, EXIF": (lambda im: encode(im, progressive=True, exif=exif_turned()), False),
    "grey": (lambda im: encode(im.convert("L")), False),
    "CMYK": (lambda im: encode(im.convert("CMYK")), False),
    "a PNG": (lambda im: encode(im, format="PNG"), False),
    "more after its end": (lambda im: encode(im) + b"more", False),
    "two in a row": (lambda im: encode(im) * 2, False),
}


@linux
@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_read_as_pillow_reads_them(name, photos, decoded_in_part):
    save, in_part = ODD[name]
    assert_crops_are_pillows(save(Image.open(io.BytesIO(photos[0]))), 4)
    assert decoded_in_part == ([True] * 7 if in_part else [])


def test_damaged_files_give_pillows_pixels_or_are_named(photos, capfd):
    """Bytes changed at random, ends cut off: never other pixels than the reference's."""
    draw = random.Random(0)
    outcomes = {True: 0, False: 0}
    for number in range(200):
        data = bytearray(draw.choice(photos))
        for _ in range(draw.choice((1, 3, 30))):
            data[draw.randrange(len(data) if number % 2 else 700)] = draw.randrange(256)
        data = bytes(data[: draw.randrange(len(data))] if number % 10 == 0 else data)
        expected = pillow(data)
        outcomes[expected is not None] += 1
        if expected is None:
            with pytest.raises(BadImageError, match=r"x\.jpg cannot be read"):
                EncodedImage(data, "x.jpg").crop((0, 0, 20, 30))
        else:
            height, width = expected.shape[0] // 2, expected.shape[1]
            crop = EncodedImage(data, "x.jpg").crop((0, 0, height, width))
            np.testing.assert_array_equal(crop.numpy(), expected[:height])
    capfd.readouterr()  # what the decoders say of broken data
    assert min(outcomes.values()) > 40


@linux
@pytest.mark.parametrize("fault", ["absent", "another version"])
def test_without_the_decoder_pillow_decodes_and_says_so_once(
    photos, caplog, capfd, monkeypatch, fault
):
    decoding._codec.cache_clear()
    box = (0, 0, 9, 9)
    crop = EncodedImage(photos[0], "x").crop(box)
    assert capfd.readouterr().err == ""
    decoding._codec.cache_clear()
    if fault == "absent":
        monkeypatch.setattr(decoding, "find_spec", lambda name: None)
    else:
        other = ModuleType("nvidia.nvimgcodec")
        other.__spec__ = find_spec(other.__name__)
        monkeypatch.setitem(sys.modules, other.__name__, other)
    for _ in range(2):
        assert torch.equal(EncodedImage(photos[0], "x").crop(box), crop)
    decoding._codec.cache_clear()
    assert caplog.text.count("Pillow decodes every image completely") == 1
