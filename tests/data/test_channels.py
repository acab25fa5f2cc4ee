import io
import math
import pickle
import random
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from tests.data.channel_files import make, write
from tresnet.data.channels import DTYPES, ChannelImage, ImageReader, Moments, measure
from tresnet.data.decoding import BadImageError
from tresnet.data.loaders import Loader
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler, eval_transform, train_sampler
from tresnet.errors import ConfigError, DataError
from tresnet.settings import Augment, EvalTransform

FOUR = ImageReader(4)


def npy(array, **options):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


def tiff(array, **options):
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **{"photometric": "minisblack", **options})
    return stream.getvalue()


FILES = {
    "npy": npy,
    "npy by columns": lambda x: npy(np.asfortranarray(x)),
    "npy of the other byte order": lambda x: npy(x.astype(x.dtype.newbyteorder(">"))),
    "npy 2.0": lambda x: npy(x, version=(2, 0)),
    "tiff": lambda x: tiff(x, planarconfig="contig"),
    "tiff as tifffile writes an array": tiff,
    "tiff with planes": lambda x: tiff(x.transpose(2, 0, 1), planarconfig="separate"),
    "tiff with pages": lambda x: tiff(x.transpose(2, 0, 1), metadata={"axes": "CYX"}),
    "big tiff of the other byte order": lambda x: tiff(x, bigtiff=True, byteorder=">"),
    "compressed tiff": lambda x: tiff(x, compression="zlib"),
    "compressed tiff with pages": lambda x: tiff(
        x.transpose(2, 0, 1), compression="zlib", metadata={"axes": "CYX"}
    ),
    "compressed strips": lambda x: tiff(x, compression="zlib", rowsperstrip=4),
    "compressed tiles": lambda x: tiff(x, compression="zlib", tile=(16, 16), planarconfig="contig"),
}


def ome(planes, more, compression):
    """Return an OME-TIFF of a page for each plane, whose XML has `more` after these; 4 channels."""
    rows, columns = planes[0].shape
    sizes = f'SizeX="{columns}" SizeY="{rows}" SizeC="4" SizeZ="1" SizeT="1" Type="uint16"'
    parts = f'<TiffData IFD="0" PlaneCount="{len(planes)}"/>{more}'
    xml = '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
    xml += f'<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" {sizes}>'
    texts = [f"{xml}{parts}</Pixels></Image></OME>", *[None] * (len(planes) - 1)]
    stream, options = io.BytesIO(), {"photometric": "minisblack", "metadata": None}
    with tifffile.TiffWriter(stream) as writer:
        for plane, text in zip(planes, texts, strict=True):
            writer.write(plane, description=text, compression=compression, **options)
    return stream.getvalue()


def bomb(**options):
    """Return a deflated TIFF of one block whose data expand to 64 MiB."""
    data = tiff(np.zeros((16, 16, 4), np.uint8), compression="zlib", **options)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        tags = file.pages[0].tags
        start, length = (tags[n] for n in ((324, 325) if "tile" in options else (273, 279)))
    block = zlib.compress(bytes(2**26))
    changed = bytearray(data + block)
    for tag, value in ((start, len(data)), (length, len(block))):
        at = tag.valueoffset
        changed[at : at + 4] = value.to_bytes(4, "little")
    return bytes(changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FILES)
def test_every_value_is_kept(kind, dtype):
    if kind.startswith("compressed") and dtype == "float16":
        pytest.skip("tifffile compresses no such pixels by zlib")
    limits = np.finfo if "float" in dtype else np.iinfo
    pixels = make(1, 0, "uint8", 5).astype(dtype)
    pixels[0, 0, :2] = limits(dtype).min, limits(dtype).max
    image = ChannelImage(FILES[kind](pixels), "x", ImageReader(5, dtype))
    assert image.size == (13, 15)
    crop = image.crop((0, 0, 9, 11))
    assert crop.dtype == torch.float32
    assert np.array_equal(crop.numpy(), pixels[:9, :11].astype(np.float64))


def test_one_channel_may_be_written_without_an_axis_of_its_own():
    pixels = make(0, 1, channels=1)
    for data in (tiff(pixels[..., 0]), tiff(pixels), npy(pixels)):
        image = ChannelImage(data, "x", ImageReader(1))
        assert np.array_equal(image.crop((0, 0, 15, 12)).numpy(), pixels.astype(np.float32))


def palette():
    Image.new("P", (4, 4), 3).save(stream := io.BytesIO(), "TIFF")
    return stream.getvalue()


BAD = {
    "another number of channels": (npy(make(0, 0, channels=3)), r"4\), got \(15, 12, 3\)"),
    "tiff of another number": (
        tiff(make(0, 0, channels=5), planarconfig="contig"),
        r"4\), got \(15, 12, 5\)",
    ),
    "channels first": (npy(make(0, 0).transpose(2, 0, 1)), "got .*: the channels come last"),
    "no channels": (npy(make(0, 0)[..., 0]), r"4\), got \(15, 12\)"),
    "objects": (npy(np.full((2, 2, 4), None)), "Python objects, which are not read"),
    "a pickle": (pickle.dumps(make(0, 0)), "neither a TIFF nor a .npy file"),
    "an image": (FILES["npy"](make(0, 0))[6:], "neither a TIFF nor a .npy file"),
    "32 bits": (npy(make(0, 0).astype(np.int32)), "uint16, .*, got int32"),
    "64 bits": (npy(make(0, 0).astype(np.float64)), "float32, got float64"),
    "not finite": (npy(np.full((2, 2, 4), np.nan, np.float32)), "finite pixels"),
    "no pixels": (npy(make(0, 0)[:, :0]), "side of 0 pixels"),
    "too many pixels": (npy(np.zeros((40, 40, 4), np.uint8)), "1600 pixels, more than 1000"),
    "a false size": (npy(make(0, 0)).replace(b"(15, 12", b"(31, 31"), "buffer is smaller"),
    "a cut tiff": (tiff(make(0, 0))[:200], "cannot be read"),
    "a palette": (palette(), "values of channels, got indices of a palette"),
    "time": (tiff(np.zeros((2, 4, 9, 9), "u2"), metadata={"axes": "TCYX"}), "got axes TCYX"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_an_error_that_names_it(kind, tmp_path):
    data, message = BAD[kind]
    (tmp_path / "some.tif").write_bytes(data)
    with pytest.raises(BadImageError, match=message) as error:
        ImageReader(4, max_pixels=1000).open(tmp_path / "some.tif")
    assert f"{tmp_path / 'some.tif'} cannot be read" in str(error.value)


OTHER = '<TiffData FirstC="2" PlaneCount="2"><UUID FileName="b.tif">urn:uuid:1</UUID></TiffData>'


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("more", ["", OTHER], ids=["missing", "in another file"])
def test_channels_that_are_missing_or_in_other_files_are_an_error(more, compression):
    planes = make(0, 0).transpose(2, 0, 1)
    image = ChannelImage(ome(planes, "", compression), "x", FOUR)
    assert np.array_equal(image.pixels, make(0, 0))
    with pytest.raises(BadImageError, match="all channels in one file, but some are missing"):
        ChannelImage(ome(planes[:2], more, compression), "x", FOUR)


def test_a_deflated_strip_that_is_cut_is_an_error():
    data = bytearray(tiff(make(0, 0), compression="zlib", planarconfig="contig"))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        count = file.pages[0].tags[279]
    data[count.valueoffset : count.valueoffset + 4] = (count.value[0] - 9).to_bytes(4, "little")
    with pytest.raises(BadImageError, match="a deflated strip or tile is incomplete"):
        ChannelImage(bytes(data), "x", FOUR)


def test_deflated_bits_in_reverse_order_are_read_as_by_tifffile():
    pixels, options = make(0, 0), {"planarconfig": "contig", "extratags": [(65000, "H", 1, 2)]}
    data = bytearray(tiff(pixels, compression="zlib", **options))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        for start, length in zip(page.dataoffsets, page.databytecounts, strict=True):
            part = np.frombuffer(data, np.uint8, length, start)
            part[:] = np.packbits(np.unpackbits(part, bitorder="little"))
        code = page.tags[65000].offset  # tifffile writes no FillOrder: another tag becomes it
        data[code : code + 2] = (266).to_bytes(2, "little")
    assert np.array_equal(tifffile.imread(io.BytesIO(data)), pixels)
    assert np.array_equal(ChannelImage(bytes(data), "x", FOUR).pixels, pixels)


def test_a_file_of_labels_names_arrays_without_their_suffix(tmp_path):
    for name in ("a.npy", "b.TIF"):
        (tmp_path / name).write_bytes((npy if name == "a.npy" else tiff)(make(0, 0)))
    (tmp_path / "train.csv").write_text("image,label\na,x\nb,y\n")
    images = open_split(tmp_path, "train", reader=FOUR)
    assert [Path(path).name for path in images.paths] == ["a.npy", "b.TIF"]
    assert [images.encoded_image(index).size for index in range(2)] == [(12, 15)] * 2


@pytest.mark.parametrize("options", [{}, {"tile": (16, 16)}])
def test_deflated_data_expand_no_further_than_declared(options):
    data = bomb(planarconfig="contig", **options)
    tracemalloc.start()
    with pytest.raises(BadImageError, match="at most 1024 bytes, got one that expands beyond"):
        ChannelImage(data, "x", FOUR)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_compression_without_a_limit_is_refused():
    with pytest.raises(BadImageError, match=r"got LZMA: save it uncompressed or with deflate"):
        ChannelImage(tiff(make(0, 0), compression="lzma"), "x", FOUR)


def test_another_type_of_pixels_than_in_training_is_an_error():
    with pytest.raises(BadImageError, match=r"uint8, as the images .* have, got uint16"):
        ChannelImage(npy(make(0, 0)), "x", ImageReader(4, "uint8"))


# -- resizing ---------------------------------------------------------------------------------


def weights(length, resized, bicubic):
    """Return the antialiased filter (resized, length), in float64, from its definition."""
    scale = length / resized
    shrink = max(scale, 1)
    x = np.abs((np.arange(length) + 0.5 - (np.arange(resized)[:, None] + 0.5) * scale) / shrink)
    if bicubic:  # Keys' filter with a = -0.5
        near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        found = np.where(x < 1, near, np.where(x < 2, far, 0))
    else:
        found = np.clip(1 - x, 0, None)
    return found / found.sum(1, keepdims=True)


def resized(pixels, rows, columns, bicubic):
    height, width, _ = pixels.shape
    along = weights(width, columns, bicubic)
    return np.einsum("yh,xw,hwc->yxc", weights(height, rows, bicubic), along, np.float64(pixels))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["squash", "center", "border"])
@pytest.mark.parametrize("shape", [(50, 37), (9, 7), (24, 24), (16, 60)])
def test_images_are_resized_in_floats(shape, mode, interpolation):
    pixels = np.random.default_rng(0).integers(0, 2**16, (*shape, 5), np.uint16)
    cfg = EvalTransform(input_size=24, crop_pct=0.9, crop_mode=mode, interpolation=interpolation)
    found = eval_transform(cfg)(ChannelImage(pixels, "x", ImageReader(5))).numpy()
    assert found.dtype == np.float32
    columns, rows = eval_sampler(cfg).resized(*shape[::-1])
    whole = resized(pixels, rows, columns, interpolation == "bicubic")
    expected = np.zeros((24, 24, 5))
    # timm's centre: torchvision rounds half to even, and pads the smaller half before
    top, left = (round((n - 24) / 2) if n >= 24 else -((24 - n) // 2) for n in (rows, columns))
    for y in range(24):
        for x in range(24):
            if 0 <= y + top < rows and 0 <= x + left < columns:
                expected[y, x] = whole[y + top, x + left]
    # float32 keeps 24 bits; a sum of some weights loses a few
    assert np.abs(found.transpose(1, 2, 0) - expected).max() <= 2**16 * 2.0**-20


def test_a_thin_image_takes_little_memory():
    """The whole resized picture would have 224 x 8,960,000 pixels."""
    pixels = np.arange(40000, dtype=np.float32)[None, :, None].repeat(4, 2)
    found = eval_transform(EvalTransform(crop_pct=1.0))(ChannelImage(pixels, "x", FOUR))
    columns = 224 * 40000
    left = (columns - 224) / 2
    expected = (left + np.arange(224) + 0.5) / 224 - 0.5
    assert np.abs(found.numpy() - expected).max() < 1e-2  # float32 at 20000 has 2**-9


def test_crops_and_flips_are_those_of_timm():
    image = ChannelImage(make(2, 3), "x", FOUR)
    sampler = train_sampler(Augment(hflip=0.5), 8, channels=4)
    timms, flips = RandomResizedCropAndInterpolation(8, (0.08, 1.0)), 0
    for seed in range(20):
        random.seed(seed)
        torch.manual_seed(seed)
        found = sampler(image).image().numpy()
        random.seed(seed)
        torch.manual_seed(seed)
        box = timms.get_params(torch.empty(15, 14), timms.scale, timms.ratio)
        top, left, height, width = map(int, box)
        flip = torch.rand(1).item() < 0.5
        crop = image.pixels[top : top + max(height, 1), left : left + max(width, 1)]
        expected = resized(crop, 8, 8, False)
        expected = expected[:, ::-1] if flip else expected
        assert np.abs(found.transpose(1, 2, 0) - expected).max() < 2**-5
        flips += flip
    assert 0 < flips < 20


def test_operations_on_colours_are_refused():
    message = "got --affine-scale .*, --auto-augment v0, .* off by --affine-scale 1 1 --auto-"
    with pytest.raises(ConfigError, match=message):
        train_sampler(Augment(affine_scale=(0.5, 1.0), auto_augment="v0"), 8, channels=4)


# -- data sets --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("channels")
    write(root, train=9)
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_images_as_floats(root, workers):
    transform = eval_sampler(EvalTransform(input_size=8, crop_pct=1.0))
    images = open_split(root, "train", transform, reader=FOUR)
    loader = Loader(images, 4, training=False, workers=workers)
    found = torch.cat([crops.render(torch.device("cpu")) for crops, _ in loader])
    loader.close()
    expected = torch.stack([images[index][0].image() for index in range(9)])
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_mean_and_deviation_are_those_of_all_pixels(root):
    images = open_split(root, "train", reader=FOUR)
    parts = [measure(images, range(rank, 9, 2)) for rank in (0, 1)]
    found = sum((moments for moments, _ in parts), Moments()).statistics
    pixels = [images.encoded_image(index).pixels.reshape(-1, 4) for index in range(9)]
    pixels = np.concatenate(pixels).astype(np.float64)
    np.testing.assert_allclose(found["mean"], pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["std"], pixels.std(0), rtol=1e-12)
    assert [[*types] for _, types in parts] == [["uint16"], ["uint16"]]


def test_moments_do_not_cancel_and_a_constant_channel_has_deviation_1():
    pixels = np.full((4, 4, 3), 1e7, np.float32)
    pixels[..., 1] += np.arange(16).reshape(4, 4)
    pixels[..., 2] = 0.1
    found = sum((Moments.of(pixels) for _ in range(100)), Moments()).statistics
    np.testing.assert_allclose(found["std"], [1, np.arange(16).std(), 1], rtol=1e-9)


@pytest.mark.parametrize("shape", [(2**20, 2, 4), (2, 2**20, 4)])
def test_moments_take_little_memory(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    tracemalloc.start()
    found = Moments.of(pixels)
    assert tracemalloc.get_traced_memory()[1] < 2**23  # 64 MiB as float64
    tracemalloc.stop()
    values, count = pixels.reshape(-1, 4).astype(np.int64), 2**21  # sums of integers are exact
    total, squares = values.sum(0), np.square(values).sum(0)
    std = [
        math.sqrt(int(q) * count - int(s) ** 2) / count for s, q in zip(total, squares, strict=True)
    ]
    np.testing.assert_allclose(found.statistics["mean"], total / count, rtol=1e-12)
    np.testing.assert_allclose(found.statistics["std"], std, rtol=1e-12)


def test_few_images_wait_to_be_measured(root, tmp_path, monkeypatch):
    monkeypatch.setattr("tresnet.data.channels.usable_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    write(tmp_path, train=1)
    (tmp_path / "train" / "field" / "000.tif").write_bytes(b"no")
    images, taken = open_split(tmp_path, "train", reader=FOUR), []
    with pytest.raises(DataError):
        measure(images, (taken.append(0) or 0 for _ in range(10000)))
    assert len(taken) == 2 * 64  # by two of the machine's threads


@pytest.mark.parametrize("other", ["train.tar", "train.parquet"])
def test_class_folders_of_arrays_come_before_tables(tmp_path, other):
    write(tmp_path, train=3)
    for path in tmp_path.rglob("*.tif"):
        path.with_suffix(".NPY").write_bytes(npy(make(0, 0)))
        path.unlink()
    (tmp_path / other).touch()
    assert len(open_split(tmp_path, "train", reader=FOUR)) == 3


def test_an_unreadable_image_is_left_out_or_an_error(root, tmp_path):
    write(tmp_path, train=3)
    (tmp_path / "train" / "lake" / "bad.npy").write_bytes(b"no")
    images = open_split(tmp_path, "train", reader=FOUR)
    with pytest.raises(DataError, match=r"bad.npy cannot be read .* with --skip-bad-images"):
        measure(images, range(4))
    images.skip_bad_images = True
    assert measure(images, range(4))[0].count == 15 * (12 + 13 + 14)


def test_other_files_are_left_out_and_counted(root, caplog):
    Image.new("RGB", (4, 4)).save(root / "train" / "lake" / "preview.png")
    assert len(open_split(root, "train", reader=FOUR)) == 9
    assert "left out 1 files" in caplog.text
    (root / "train" / "none").mkdir()
    with pytest.raises(DataError, match=r"add images \(npy, tif, tiff\)"):
        open_split(root, "train", reader=FOUR)
