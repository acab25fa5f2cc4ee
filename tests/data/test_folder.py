import multiprocessing
import os
import struct
import sys
from collections import Counter

import numpy as np
import pytest
import tifffile
from PIL import Image
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader, pil_loader

from tests.hf import private_bytes
from tresnet.data import folder
from tresnet.data.channels import RGB, SUFFIXES, ImageReader
from tresnet.data.dataset import Paths
from tresnet.data.decoding import BadImageError
from tresnet.data.sources import open_split
from tresnet.errors import DataError


def test_files_and_labels_are_in_torchvisions_order(tmp_path, make_images, caplog):
    make_images(tmp_path / "val", {"b": 2, "B": 1, "a": 0})
    make_images(tmp_path / "val" / "a", {"sub": 1, "s": 1})
    for name in ("a.JPG", "Z.png", "sub.png", "gif.gif", "no.txt", "none"):
        (tmp_path / "val" / "a" / name).touch()
    (tmp_path / "val" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "val" / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "val" / "a" / "lost.png").symlink_to(tmp_path / "nothing")
    make_images(tmp_path, {"elsewhere": 2})
    theirs = DatasetFolder(str(tmp_path / "val"), default_loader, SUFFIXES)
    for hidden in (".ipynb_checkpoints", "a/.ipynb_checkpoints", "b/.git"):
        make_images(tmp_path / "val", {hidden: 1})
    for name in ("a/._Z.png", "a/.DS_Store", "stray.png"):
        (tmp_path / "val" / name).touch()
    dataset = open_split(tmp_path, "val")
    assert [record.getMessage() for record in caplog.records] == [
        f"left out 8 files in {tmp_path}/val: 5 hidden, 1 .txt, 1 beside the class folders, 1 "
        "without suffix",
        f"{tmp_path}/val: classes look alike: 'B' and 'b': if they are one class, write its name"
        " alike",
    ]
    image, label = dataset[0]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (2, 2, 2), 0)
    found = list(zip(dataset.paths, dataset.targets.tolist(), strict=True))
    assert (found, dataset.classes) == (theirs.samples, theirs.classes)
    assert set(SUFFIXES) > set(IMG_EXTENSIONS)
    formats = Image.registered_extensions()
    assert all(formats[suffix] in Image.OPEN for suffix in SUFFIXES)
    with pytest.raises(DataError, match=r"cannot list .*/gone: No such file"):
        folder.image_files(str(tmp_path / "gone"), Counter(), SUFFIXES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "least", "most"), [(list, 5e6, 5e7), (Paths, 0, 5e5)])
def test_reading_paths_copies_no_memory_in_a_worker(kind, least, most):
    """A list's strings, whose reference counts change, are copied; 110 MiB for a million."""
    paths = kind(f"/data/imagenet/train/n01440764/n01440764_{i:06d}.JPEG" for i in range(100_000))
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()

    def read():
        before = private_bytes()
        for path in paths:
            assert path
        sender.send(private_bytes() - before)

    worker = fork.Process(target=read)
    worker.start()
    grown = receiver.recv()
    worker.join()
    assert least <= grown <= most


@pytest.mark.parametrize("link", ["loop", "sub/loop"])
@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_folder_that_holds_it_is_named(tmp_path, make_images, link, target):
    make_images(tmp_path / "train", {"a": 2, "a/sub": 1, "b": 1})
    loop = tmp_path / "train" / "a" / link
    loop.symlink_to((loop.parent / target).resolve())
    with pytest.raises(DataError, match=rf"{loop}.* is .*train/a(/sub)? again, by a symbolic"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (None, r"root/train/<class>/<image>, but .*root is not a folder: check --data"),
        ({"training/a": 1}, r"no folder 'train' in .*, which holds: training"),
        ({"train": 1}, "has no class folders"),
        ({"train/a": 1, "train/b": 0, "train/c": 0}, r"the 3 class folders .* none in: b, c; add"),
        ({f"train/{i}": 0 for i in range(10)}, "none in: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; add"),
        ({f"train/{i:02d}": 0 for i in range(25)}, "none in: 00, 01, .*, 09 and 15 more;"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(tmp_path, make_images, folders, message):
    if folders is not None:
        make_images(tmp_path / "root", folders)
    for place in tmp_path.glob("root/train/c"):
        (place / "readme.md").write_text("not an image")
    with pytest.raises(DataError, match=message):
        open_split(tmp_path / "root", "train")


def tiff(path, **options):
    tifffile.imwrite(path, np.array([[0, 257, 32896, 65535]], np.uint16), **options)


def twelve_bits(path):
    packed = int("".join(f"{value:012b}" for value in (0, 16, 2056, 4095)), 2).to_bytes(6, "big")
    tags = (256, 4), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 6)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = b"II*\0" + struct.pack("<I", 14) + packed + struct.pack("<H", len(tags))
    path.write_bytes(head + entries + bytes(4))


def palette(path):
    image = Image.new("P", (1, 1), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.save(path, transparency=bytes([128, 64]))  # of which Pillow warns


GREYS = [0, 128, 129, 32896, 65535, 257], [0, 0, 1, 128, 255, 1]
# A file's name, what writes it, and its first row in red or why it cannot be read.
PICTURES = [
    *((f"wide.{suffix}", lambda path: Image.fromarray(np.array([GREYS[0]], np.uint16)).save(path),
       GREYS[1]) for suffix in ("png", "tif", "pgm")),
    ("white_is_0.tif", lambda path: tiff(path, photometric="miniswhite"), [255, 254, 127, 0]),
    ("twelve_bits.tif", twelve_bits, [0, 1, 128, 255]),
    ("palette.png", palette, [200]),
    ("gone.png", lambda path: None, "FileNotFoundError"),
    ("folder.png", lambda path: path.mkdir(), ".*not a regular file"),
    ("pipe.png", lambda path: os.mkfifo(path), ".*not a regular file"),  # would block
    ("zero.png", lambda path: path.symlink_to("/dev/zero"), ".*not a regular file"),
    ("array.npy", lambda path: np.save(path, np.zeros((4, 4, 3), np.uint8)),
     r".*NumPy array\): save its pixels as an image"),
    ("empty.png", lambda path: path.touch(), "UnidentifiedImageError"),
    ("page.png", lambda path: path.write_text("<html>404</html>"),
     r"UnidentifiedImageError: cannot identify image file\)"),
    ("head.png", lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 64), ".+"),
    ("float.tif", lambda path: Image.fromarray(np.zeros((4, 4), np.float32)).save(path),
     ".*'F' has no defined range"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "expected"), PICTURES)
def test_a_file_gives_its_colours_or_is_named(tmp_path, name, make, expected):
    make(tmp_path / name)
    if isinstance(expected, list):
        assert np.asarray(RGB.open(tmp_path / name).rgb())[0, :, 0].tolist() == expected
    else:
        with pytest.raises(BadImageError, match=rf"{name} cannot be read \({expected}"):
            RGB.open(tmp_path / name).rgb()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif"])
def test_a_truncated_image_is_named(tmp_path, photo, suffix):
    path = tmp_path / f"cut.{suffix}"
    photo.save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(BadImageError, match=rf"cut\.{suffix} cannot be read \(.+\): replace"):
        RGB.open(path).rgb()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_eight_bit_modes_become_rgb_as_torchvision_does(tmp_path, photo, mode):
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    photo.convert(mode).save(path)
    image = RGB.open(path).rgb()
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(pil_loader(path)))


@pytest.mark.parametrize("mode", ["RGBA", "RGBX", "LA"])
def test_a_channel_of_a_tiff_that_is_not_read_is_named(tmp_path, photo, mode, caplog):
    path = tmp_path / "image.tif"
    photo.convert(mode).save(path)
    RGB.open(path).rgb()
    assert f"{path}: only the colours of this TIFF file are read" in caplog.text


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "tif", "ppm"])
def test_each_reader_has_its_own_limit_of_pixels(tmp_path, suffix, monkeypatch):
    """Pillow's limit is the program's: it holds without an own limit, and does not change."""
    path = tmp_path / f"image.{suffix}"
    Image.new("RGB", (30, 20)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for limit in (600, 599, 600):
        if limit == 599:
            with pytest.raises(
                BadImageError, match=r"600 pixels, more than 599\): .*trust it, raise"
            ):
                ImageReader(max_pixels=limit).open(path)
        else:
            image = ImageReader(max_pixels=limit).open(path)
            assert image.crop((0, 0, 20, 30)).shape == (20, 30, 3)
            assert image.rgb().size == (30, 20)
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(Image.DecompressionBombError), path.open("rb") as file:
        Image.open(file)
    if suffix != "ppm":  # its bytes are all there
        with pytest.raises(BadImageError, match="DecompressionBombError"):
            RGB.open(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert RGB.open(path).rgb().size == (30, 20)


def test_a_full_memory_names_the_image(tmp_path, photo):
    def fill(image):
        raise MemoryError

    for label in "ab":
        (tmp_path / "val" / label).mkdir(parents=True)
        photo.save(tmp_path / "val" / label / "image.png")
    dataset = open_split(tmp_path, "val")
    dataset.transform = fill
    with pytest.raises(BadImageError, match=r"a/image\.png cannot be read \(MemoryError:\): free"):
        dataset[0]
