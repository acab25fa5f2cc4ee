"""The ranking by cosines against NumPy's, the command's forms, and what it cannot read."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main as run
from tresnet.errors import InputError, WriteError
from tresnet.models.zoo import build
from tresnet.predictions import similar

SIDE = 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return a random model and its file."""
    torch.manual_seed(0)
    model = build("tresnet_t", num_classes=3).eval()
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_checkpoint(model, path)
    return model, path


@pytest.fixture
def folder(tmp_path):
    """Write seven noisy images; return the folder and the paths."""
    noise, paths = np.random.default_rng(0), []
    (tmp_path / "images" / "more").mkdir(parents=True)
    for index in range(7):
        pixels = noise.integers(0, 30 * index + 40, (SIDE, SIDE, 3))
        paths.append(tmp_path / "images" / ("more" if index > 4 else "") / f"{index}.png")
        Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    return tmp_path / "images", paths


def cosines(model, paths, query):
    """Return the cosine of each path's pooled features and the query's, by NumPy."""
    pixels = torch.stack([pil_to_tensor(Image.open(path)) for path in [query, *paths]]) / 255
    with torch.inference_mode():
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    first, *others = features.double().numpy()
    norms = np.linalg.norm(first) * np.linalg.norm(others, axis=1)
    return dict(zip(map(str, paths), np.array(others) @ first / norms, strict=True))


def test_images_are_ranked_by_the_cosine_of_their_features(weights, folder, tmp_path, capsys):
    model, path = weights
    place, paths = folder
    expected = cosines(model, paths, paths[2])
    ranking = sorted(expected, key=lambda name: -expected[name])
    assert ranking[0] == str(paths[2])
    found = similar(paths[2], place, weights=path, batch_size=3)
    assert [one.image for one in found] == ranking
    for one in found:
        assert one.similarity == pytest.approx(expected[one.image], abs=1e-6)
    command = ["similar", str(paths[2]), str(place), "--weights", str(path), "--top-k", "4"]
    sheet = tmp_path / "sheet.png"
    assert run([*command, "--format", "csv", "--sheet", str(sheet)]) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["rank", "similarity", "image"]
    assert [row[2] for row in rows] == ranking[:4]
    with Image.open(sheet) as picture:  # five thumbnails in a row
        assert picture.size == (5 * 168 + 8, 184 + 8)
        thumbnail = np.asarray(picture)[8 : 8 + SIDE, 168 + 8 : 168 + 8 + SIDE]
    np.testing.assert_array_equal(thumbnail, np.asarray(Image.open(ranking[0])))
    assert run(command) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "1"
    assert run([*command, "--sheet", str(sheet)]) == 2
    assert f"{sheet} exists" in capsys.readouterr().err


def test_unreadable_images_are_named(weights, folder, capsys):
    place, paths = folder
    paths[0].write_bytes(b"no image")
    command = ["similar", str(paths[1]), str(place), "--weights", str(weights[1])]
    assert run(command) == 2
    printed = capsys.readouterr()
    assert f"{paths[0]} cannot be read" in printed.err
    assert len(printed.out.splitlines()) == 1 + 6
    assert run(["similar", str(paths[0]), str(place), "--weights", str(weights[1])]) == 2
    assert capsys.readouterr().out == ""


def test_several_images_to_compare_with_are_refused(folder, weights):
    with pytest.raises(InputError, match="expected one image to compare with, got 7"):
        similar(str(folder[0]), str(folder[0]), weights=weights[1])


@pytest.mark.parametrize("top_k", [-1, 0, 2.5])
def test_a_number_of_images_is_at_least_one(top_k):
    with pytest.raises(InputError, match=f"top_k of at least 1, a whole number, got {top_k}"):
        similar("none", "none", weights="none", top_k=top_k)


def test_a_sheet_that_cannot_be_drawn_is_refused_before_images_are_read(folder, weights, tmp_path):
    save_checkpoint(build("tresnet_t", num_classes=3, in_chans=4), tmp_path / "four.safetensors")
    sheet = {"sheet": tmp_path / "sheet.png"}
    with pytest.raises(InputError, match=r"RGB with --sheet, .*takes 4 channels: leave"):
        similar("none.tif", "none", weights=tmp_path / "four.safetensors", **sheet)
    with pytest.raises(WriteError, match=r"cannot write .*: the directory .*/no does not exist"):
        similar("none.tif", "none", weights=weights[1], sheet=tmp_path / "no/sheet.png")
    array = np.zeros((4, 4, 3), np.uint8)
    for image, images in ((array, "none"), ("none", ["none", array])):
        with pytest.raises(InputError, match="expected paths of images with --sheet, got array"):
            similar(image, images, weights=weights[1], **sheet)


def test_a_sheet_may_show_a_folder_of_one_image(folder, weights, tmp_path):
    place, paths = folder
    (tmp_path / "one").mkdir()
    paths[3].rename(tmp_path / "one/3.png")
    similar(tmp_path / "one", iter([place]), weights=weights[1], sheet=tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        thumbnail = np.asarray(picture)[8 : 8 + SIDE, 8 : 8 + SIDE]
    np.testing.assert_array_equal(thumbnail, np.asarray(Image.open(tmp_path / "one/3.png")))


def test_weights_without_a_pool_are_refused(folder, tmp_path):
    model = build("tresnet_t", num_classes=0, global_pool="")
    save_checkpoint(model, tmp_path / "maps.safetensors")
    with pytest.raises(InputError, match=r"with a global pool, but .* saved with global_pool=''"):
        similar(folder[1][0], folder[0], weights=tmp_path / "maps.safetensors")
