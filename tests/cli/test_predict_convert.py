import csv
import io
import itertools
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

import tresnet
from tests.toys import same, smallest
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main as run
from tresnet.cli.predict import _with_maps_saved
from tresnet.data.decoding import BadImageError
from tresnet.errors import InputError, OutputError
from tresnet.predictions import Prediction, predictor, reader
from tresnet.settings import InferenceCompute

CLASSES = ["zero", "one", "two"]
FRUIT = ["Apple, green", "Apple, red", "Pear"]
# percent of the logits 4, 1 and 0
SOFTMAX, SIGMOID = (93.6, 4.7, 1.7), (98.2, 73.1, 50.0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Write weights of a tresnet_t that predicts 'two' for every image."""
    torch.manual_seed(0)
    model = smallest()
    with torch.no_grad():
        model.get_parameter("head.fc.weight").zero_()
        model.get_parameter("head.fc.bias").copy_(torch.tensor([0.0, 1.0, 4.0]))
    path = tmp_path_factory.mktemp("weights") / "three.safetensors"
    save_checkpoint(model, path, metadata={"classes": CLASSES})
    return path


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "digit.png"
    Image.new("L", (8, 8), 200).save(path)
    return path


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Write five images to a folder and a folder in it; return the folder and the paths."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "more").mkdir()
    noise = torch.Generator().manual_seed(0)
    paths = [folder / f"{name}.png" for name in ("a", "b", "c", "d", "more/a")]
    for path in paths:
        to_pil_image(torch.rand(3, 40, 50, generator=noise)).save(path)
    (folder / "notes.txt").touch()
    return folder, [str(path) for path in paths]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return a random model with class names that predicts several classes, and its file."""
    torch.manual_seed(0)
    model = smallest(num_classes=4).eval()
    with torch.no_grad():
        model.get_parameter("head.fc.weight").normal_()
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_checkpoint(model, path, metadata={"classes": ["cat", "dog", "tench, fish", "owl"]})
    return model, path


def read(text):
    """Return the command's JSON: a list of (image, classes, probabilities)."""
    keys = ("class", "probability")
    return [
        (row["image"], *(tuple(one[key] for one in row["predictions"]) for key in keys))
        for row in json.loads(text)
    ]


@pytest.mark.parametrize("source", ["folder", "pattern", "stdin"])
def test_predict_agrees_with_the_model(source, drawn, photographs, capsys, monkeypatch):
    """Compare with the model on images that are resized, cropped and scaled as in evaluation."""
    model, path = drawn
    folder, paths = photographs
    words = {"folder": [str(folder)], "pattern": [f"{folder}/**/*.png"], "stdin": ["-"]}[source]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n".join(paths) + "\n"))
    command = ["predict", *words, "--weights", str(path), "--top-k", "2", "--batch-size", "2"]
    assert run([*command, "--format", "json"]) == 0
    found = read(capsys.readouterr().out)
    assert [image for image, _, _ in found] == paths
    for image, classes, chances in found:
        picture = Image.open(image).resize((40, 32), Image.Resampling.BILINEAR)
        x = pil_to_tensor(picture)[None, :, :, 4:36] / 255
        with torch.inference_mode():
            expected, numbers = model(x)[0].softmax(0).topk(2)
        assert classes == tuple(("cat", "dog", "tench, fish", "owl")[n] for n in numbers)
        assert chances == pytest.approx(expected.tolist(), rel=1e-4)


def test_csv_has_the_figures_of_json(drawn, photographs, capsys):
    command = ["predict", str(photographs[0]), "--weights", str(drawn[1]), "--top-k", "2"]
    assert run([*command, "--format", "json"]) == 0
    expected = [
        [row["image"], str(rank), one["class"], str(one["number"]), str(one["probability"])]
        for row in json.loads(capsys.readouterr().out)
        for rank, one in enumerate(row["predictions"], 1)
    ]
    assert run([*command, "--format", "csv"]) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert (header, rows) == (["image", "rank", "class", "number", "probability"], expected)


def test_predict_in_python_is_the_command(drawn, photographs, capsys):
    folder, paths = photographs
    assert run(["predict", str(folder), "--weights", str(drawn[1]), "--format", "json"]) == 0
    printed = read(capsys.readouterr().out)
    pixels = torch.stack([pil_to_tensor(Image.open(path)) for path in paths])
    arrays = [np.asarray(Image.open(path)) for path in paths]
    mirrored = [array[..., ::-1] for array in arrays]  # BGR, as OpenCV reads images
    opened = [Image.open(path) for path in paths]
    straight = [array[..., ::-1] for array in mirrored]
    for images in (folder, paths, opened, pixels, list(pixels), arrays, np.stack(arrays), straight):
        found = tresnet.predict(images, weights=drawn[1])
        assert [(p.classes, p.probabilities) for p in found] == [row[1:] for row in printed]
    assert len(tresnet.predict(pixels[0], weights=drawn[1], top_k=9)[0].classes) == 4
    assert len(tresnet.predict(arrays[0], weights=drawn[1])) == 1
    for wrong, got in (
        (pixels / 255, r"torch.float32 \(3,"),
        (arrays[0] / 255.0, r"float64 \("),
        (np.array(3), r"int64 \(\)"),
        (torch.zeros(3, 4, 4, requires_grad=True), r"torch.float32 \(3,"),
        (torch.zeros(3, 4, 4, dtype=torch.bfloat16), r"torch.bfloat16 \(3,"),
        (pixels[0].permute(1, 2, 0), r"torch.uint8 \("),
        ([arrays[0][..., 0]], r"uint8 \(\d+, \d+\)"),
        (arrays[0][..., 0], r"uint8 \(\d+, \d+\)"),
    ):
        with pytest.raises(InputError, match=rf"\(3, H, W\) in torch.uint8, got {got}"):
            tresnet.predict(wrong, weights=drawn[1])
    encoded = [Path(path).read_bytes() for path in paths]
    sent = [io.BytesIO(data) for data in encoded]
    for images in (encoded, list(map(bytearray, encoded)), list(map(memoryview, encoded)), sent):
        found = tresnet.predict(images, weights=drawn[1])
        assert [(p.classes, p.probabilities) for p in found] == [row[1:] for row in printed]
        assert [p.image for p in found] == [f"image {number}" for number in range(5)]
    with open(paths[0], "rb") as file:
        for one in (encoded[0], bytearray(encoded[0]), io.BytesIO(encoded[0]), file):
            assert len(tresnet.predict(one, weights=drawn[1])) == 1
    with pytest.raises(BadImageError, match="expected an image, but image 0 cannot be read"):
        tresnet.predict(b"no image", weights=drawn[1])
    for weights in (b"\x89PNG", 5, drawn[0], drawn[0].state_dict(), io.BytesIO(b"")):
        kind = type(weights).__name__
        for load in (
            lambda weights: tresnet.predict(pixels, weights=weights),
            lambda weights: tresnet.predict(pixels, weights=weights, runtime="onnx"),
            lambda weights: create(weights=weights),
            lambda weights: tresnet.load_checkpoint(drawn[0], weights),
        ):
            with pytest.raises(InputError, match=rf"the path of [a-z ]+, got {kind}$"):
                load(weights)
    with pytest.raises(InputError, match="expected images, or an iterable of them, got None"):
        tresnet.predict(None, weights=drawn[1])
    with pytest.raises(InputError, match="expected a file opened in binary mode"):
        tresnet.predict(io.StringIO(), weights=drawn[1])
    with pytest.raises(InputError, match="expected top_k of at least 1, a whole number, got 2"):
        tresnet.predict(pixels, weights=drawn[1], top_k=2.0)


def while_reading(monkeypatch, subject, action):
    """Call `action` in each thread in which the predictor `subject` reads an image."""
    images = subject._backend.images
    reading = lambda picture: (action(), images.transform(picture))[1]  # noqa: E731
    replaced = subject._backend._replace(images=images._replace(transform=reading))
    monkeypatch.setattr(subject, "_backend", replaced)


def test_many_images_are_read_at_once_and_predicted_in_order(drawn, monkeypatch):
    """Read each image only while another image is read; compare the order of predictions."""
    pool = ThreadPoolExecutor(2)
    monkeypatch.setattr(reader, "_threads", lambda process: pool)
    both = threading.Barrier(2, timeout=20)
    images = [np.full((32, 32, 3), 40 * i, np.uint8) for i in range(6)]
    alone = [tresnet.predict(image, weights=drawn[1])[0].probabilities for image in images]
    many = predictor.Predictor(drawn[1], batch_size=2)
    while_reading(monkeypatch, many, both.wait)
    found = list(many(images))
    assert [one.image for one in found] == [f"image {i}" for i in range(6)]
    for one, expected in zip(found, alone, strict=True):
        assert one.probabilities == pytest.approx(expected, rel=1e-5)


def test_a_table_has_a_line_for_each_image(weights, tmp_path, capsys):
    paths = [tmp_path / name for name in ("a\nb.png", "c\x1b[1m.png", "é ü.png")]
    for path in paths:
        Image.new("L", (8, 8), 200).save(path)
    assert run(["predict", *map(str, paths), "--weights", str(weights)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"{tmp_path}/{name}" for name in ("a\\nb.png", "c\\x1b[1m.png", "é ü.png")
    ]


def test_calls_share_their_threads(drawn, monkeypatch):
    threads, one = [], predictor.Predictor(drawn[1])
    while_reading(monkeypatch, one, lambda: threads.append(threading.current_thread()))
    for _ in range(reader.usable_cores() + 1):
        list(one(np.zeros((32, 32, 3), np.uint8)))
    assert len(set(threads)) <= reader.usable_cores()


def test_maps_are_grad_cam(drawn, photographs, tmp_path, monkeypatch):
    """Compare with the class's weights applied to each pixel, which Grad-CAM equals here."""
    pytest.importorskip("torchcam")
    from tresnet.predictions import maps

    model, path = drawn
    seen = []
    overlay = maps.overlay_mask
    monkeypatch.setattr(maps, "overlay_mask", lambda *a, **k: seen.append(a[1]) or overlay(*a, **k))
    folder = tmp_path / "cam"
    arguments = ["predict", *photographs[1], "--weights", str(path), "--cam", str(folder)]
    assert run(arguments) == 0
    names = [f"0000{i}_{n}.png" for i, n in enumerate(("a", "b", "c", "d", "a"))]
    assert sorted(file.name for file in folder.iterdir()) == names
    for file in folder.iterdir():
        with Image.open(file) as picture:
            assert picture.size == (32, 32)
    for image, found in zip(photographs[1], seen, strict=True):
        picture = Image.open(image).resize((40, 32), Image.Resampling.BILINEAR)
        with torch.no_grad():
            features = model.forward_features(pil_to_tensor(picture)[None, :, :, 4:36] / 255)
            weights = model.head.fc.weight[model.forward_head(features).argmax()]
        expected = torch.einsum("k,khw->hw", weights, features[0]).relu()
        expected = (expected - expected.min()) / (expected.max() - expected.min())
        torch.testing.assert_close(pil_to_tensor(found)[0], expected, rtol=1e-3, atol=1e-3)


def test_threads_share_a_predictor_with_maps(drawn):
    pytest.importorskip("torchcam")
    one = predictor.Predictor(drawn[1], maps=True, device="cpu")
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    alone = [next(one(image)).map for image in images]
    with ThreadPoolExecutor(8) as pool:
        shared = list(pool.map(lambda image: next(one(image)).map, images))
    assert shared == alone


def test_unreadable_images_are_named_and_the_others_predicted(
    weights, image, tmp_path, capsys, monkeypatch, recwarn
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # Pillow refuses images above twice this
    broken, missing, bomb = (tmp_path / f"{name}.png" for name in ("broken", "missing", "bomb"))
    broken.write_bytes(image.read_bytes()[:40])
    Image.new("L", (20, 8), 200).save(bomb)
    files = [str(path) for path in (broken, missing, bomb, image)]
    assert run(["predict", *files, "--weights", str(weights)]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"{image}:   two (93.6 %)\n"  # padded to the longest name
    for line, path in zip(printed.err.splitlines(), (broken, missing, bomb), strict=True):
        assert line.startswith(f"error: expected an image, but {path} cannot be read")
    assert "bomb.png cannot be read (DecompressionBombError" in printed.err
    assert "or if you trust it, raise the limit by --max-image-pixels\n" in printed.err
    trusted = ["predict", str(bomb), "--weights", str(weights), "--max-image-pixels", "1000"]
    assert run(trusted) == 0
    assert len(recwarn) == 0


@pytest.mark.parametrize("format", ["table", "json", "csv"])
def test_outputs_that_are_not_finite_are_counted(format, weights, photographs, tmp_path, capsys):
    """The bias is finite in float32 alone."""
    path, model = tmp_path / "large.safetensors", create(weights=weights)
    with torch.no_grad():
        model.get_parameter("head.fc.bias")[0] = 1e5
    save_checkpoint(model, path, metadata={"classes": CLASSES})
    command = ["predict", str(photographs[0]), "--weights", str(path), "--format", format]
    assert run([*command, "--dtype", "fp16", "--batch-size", "4"]) == 2
    printed = capsys.readouterr()
    assert [line.partition(" images in ")[0][-8:] for line in printed.err.splitlines()] == [
        "r 4 of 4",
        "r 1 of 1",
    ]
    assert "in fp16: choose --dtype fp32, or bf16\n" in printed.err
    assert "nan" not in printed.out.lower()
    if format == "json":
        assert json.loads(printed.out) == []
    with pytest.raises(OutputError, match="for 5 of 5 images in fp16"):
        tresnet.predict(photographs[1], weights=path, compute=InferenceCompute(dtype="fp16"))
    assert run(command) == 0


def test_the_order_is_that_of_the_logits(weights, image, tmp_path):
    """Sigmoids of large logits are all 1, so they have no order."""
    path, model = tmp_path / "sure.safetensors", create(weights=weights)
    with torch.no_grad():
        model.get_parameter("head.fc.bias").copy_(torch.tensor([60.0, 80.0, 80.0]))
    save_checkpoint(model, path, metadata={"labels": "multi"})
    (found,) = tresnet.predict(image, weights=path, top_k=3)
    assert (found.numbers, found.probabilities) == ((1, 2, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("metadata", "options", "expected"),
    [
        ({"labels": "multi"}, {}, [2]),
        ({"labels": "multi", "threshold": 0.6}, {}, [2, 1]),
        ({"labels": "multi", "threshold": [0.4, 0.8, 0.99]}, {}, [0]),
        ({"labels": "multi", "threshold": [0.4, 0.8, 0.99]}, {"top_k": 2}, [2, 1]),
        ({"labels": "multi", "threshold": [0.6, 0.8, 0.99]}, {}, []),
        ({"labels": "multi"}, {"threshold": 0.5}, [2, 1, 0]),
        ({"labels": "multi"}, {"threshold": 0.5, "top_k": 2}, [2, 1]),
        ({"labels": "multi"}, {"threshold": [0.1, 0.99, 0.2]}, [2, 0]),
        ({}, {"threshold": 0.95}, []),
        ({}, {"threshold": 0.9}, [2]),
        ({}, {"threshold": {"zero": 0.01, "one": 0.05, "two": 0.2}, "top_k": 3}, [2, 0]),
    ],
)
def test_labels_are_predicted_from_their_thresholds(
    metadata, options, expected, weights, image, tmp_path, capsys
):
    """Sigmoids are 0.982, 0.731 and 0.5 for 'two', 'one' and 'zero', as SIGMOID has them."""
    path, words = tmp_path / "a.safetensors", []
    save_checkpoint(create(weights=weights), path, metadata={"classes": CLASSES, **metadata})
    for name, value in options.items():
        if isinstance(value, list | dict):
            (tmp_path / "thresholds.json").write_text(json.dumps(value))
            options = options | {name: str(tmp_path / "thresholds.json")}
        words += [f"--{name.replace('_', '-')}", str(options[name])]
    (found,) = tresnet.predict(image, weights=path, **options)
    assert list(found.numbers) == expected
    command = ["predict", str(image), "--weights", str(path), *words]
    assert run([*command, "--format", "json"]) == 0
    ((_, classes, _),) = read(capsys.readouterr().out)
    assert classes == tuple(CLASSES[number] for number in expected)
    assert run(command) == 0
    assert capsys.readouterr().out.endswith("none\n") == (not expected)


@pytest.mark.parametrize("content", ["[0.1, 0.2]", '{"zero": 0.1}', "[0.1, 0.2, 2]", "text", "[["])
def test_thresholds_that_do_not_fit_are_refused(content, weights, image, tmp_path, capsys):
    (tmp_path / "thresholds.json").write_text(content)
    command = ["predict", str(image), "--weights", str(weights), "--threshold"]
    for value in (str(tmp_path / "thresholds.json"), "1.5", str(tmp_path / "absent.json")):
        assert run([*command, value]) == 2
        assert "threshold: " in capsys.readouterr().err


def test_a_callers_autocast_changes_nothing(drawn, photographs):
    pytest.importorskip("torchcam")
    alone = predictor.Predictor(drawn[1], maps=True)
    expected = [(p.probabilities, np.asarray(p.map).tolist()) for p in alone(photographs[1])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one in (alone, predictor.Predictor(drawn[1], maps=True)):
            found = [(p.probabilities, np.asarray(p.map).tolist()) for p in one(photographs[1])]
            assert found == expected


def test_a_predictor_is_sent_to_another_process(drawn, photographs):
    alone = predictor.Predictor(drawn[1], top_k=2, max_image_pixels=2000)
    (sent,) = pickle.loads(pickle.dumps([alone]))
    assert list(sent(photographs[1])) == list(alone(photographs[1]))
    Image.new("L", (50, 41)).save(file := io.BytesIO(), "PNG")
    with pytest.raises(BadImageError, match="2050 pixels, more than 2000"):
        list(sent(file.getvalue()))


def test_images_that_cannot_be_read_are_named_and_the_others_predicted(drawn, image):
    with image.open("rb") as closed:
        pass
    empty = [
        Image.new("RGB", (0, 5)),
        np.zeros((5, 0, 3), np.uint8),
        torch.zeros(3, 0, 4, dtype=torch.uint8),
    ]
    thin, bad = Image.new("RGB", (1, 40_000), 200), []
    given = [image, *empty, thin, closed, image.read_bytes(), io.BytesIO(image.read_bytes())]
    found = list(predictor.Predictor(drawn[1])(given, bad=bad.append))
    assert [one.image for one in found] == [str(image), "image 4", "image 6", "image 7"]
    assert [error.path for error in bad] == ["image 1", "image 2", "image 3", "image 5"]
    assert all("it has a side of 0 pixels" in error.reason for error in bad[:3])
    assert "image 5 cannot be read (ValueError: read of closed file" in str(bad[3])
    with pytest.raises(BadImageError, match="image 0 cannot be read"):
        tresnet.predict([closed], weights=drawn[1])


def test_a_full_memory_names_the_image_and_leaves_the_others(drawn, photographs, monkeypatch):
    def fill():
        if next(calls) == 2:
            raise MemoryError

    calls, bad = itertools.count(1), []
    monkeypatch.setattr(reader, "_threads", lambda process: ThreadPoolExecutor(1))
    one = predictor.Predictor(drawn[1])
    while_reading(monkeypatch, one, fill)
    assert len(list(one(photographs[1], bad=bad.append))) == 4
    (error,) = bad
    assert f"{photographs[1][1]} cannot be read (MemoryError:): free some memory" in str(error)


def test_a_folder_holds_every_format_that_pillow_reads(weights, image, tmp_path, capsys, caplog):
    names = ["a.gif", "b.JFIF", "c.jp2", "d.avif", "digit.png"]
    for name in names[:-1]:
        with Image.open(image) as picture:
            picture.save(tmp_path / name)
    for name in ("notes.txt", "README", ".DS_Store"):
        (tmp_path / name).touch()
    assert run(["predict", str(tmp_path), "--weights", str(weights), "--format", "json"]) == 0
    assert [name for name, _, _ in read(capsys.readouterr().out)] == [
        str(tmp_path / n) for n in names
    ]
    left_out = f"left out 3 files in {tmp_path}: 1 .txt, 1 hidden, 1 without suffix"
    assert left_out in caplog.text


@pytest.mark.parametrize("given", ["", "/*.png", "/cat[1].png"])
@pytest.mark.parametrize("other", [True, False])
def test_a_name_is_no_pattern_again(given, other, weights, image, tmp_path, capsys):
    link = tmp_path / "cat[1].png"
    link.symlink_to(tmp_path / "absent")
    if other:
        (tmp_path / "cat1.png").write_bytes(image.read_bytes())
    arguments = [str(image), str(tmp_path) + given, "--weights", str(weights), "--format", "json"]
    expected = [image]
    if given != "/cat[1].png":
        expected += [tmp_path / "cat1.png"] * other + [image]
    # a pattern matches no dangling link, which a folder has and which can be named
    assert run(["predict", *arguments]) == (0 if given == "/*.png" else 2)
    printed = capsys.readouterr()
    assert [name for name, _, _ in read(printed.out)] == [*map(str, expected)]
    assert (f"but {link} cannot be read" in printed.err) == (given != "/*.png")


@pytest.mark.parametrize("stem", ["\u0436" * 125, "a" + "\u0436" * 125, "x\udcff" * 125, "a" * 251])
def test_a_maps_name_fits_the_file_system(stem, tmp_path):
    """Names of 255 bytes at most are counted in bytes, of which a letter may have several."""
    picture = Image.new("RGB", (2, 2))
    found = [Prediction(f"/images/{stem}.png", (), (), (), picture) for _ in range(2)]
    assert [*_with_maps_saved(iter(found), tmp_path)] == found
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name[:7] for name in names] == [f"{index:05}_{stem[0]}" for index in range(2)]


@pytest.mark.parametrize("given", ["", "/**/*.png", "/*/*/*.png"])
def test_a_link_that_leads_back_is_named(given, weights, image, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "back").symlink_to(tmp_path)
    assert run(["predict", f"{tmp_path}{given}", "--weights", str(weights)]) == 2
    assert f"{tmp_path}/more/back is {tmp_path} again" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["center", "border"])
def test_images_that_are_not_square_are_predicted_as_evaluated(image, mode, tmp_path, capsys):
    torch.manual_seed(0)
    model, path = smallest().eval(), tmp_path / "wide.safetensors"
    model.pretrained_cfg |= {"input_size": (3, 32, 64), "crop_mode": mode, "crop_pct": 1.0}
    save_checkpoint(model, path)
    assert run(["predict", str(image), "--weights", str(path), "--format", "json"]) == 0
    ((_, classes, chances),) = read(capsys.readouterr().out)
    x = torch.zeros(1, 3, 32, 64)
    x[..., slice(None) if mode == "center" else slice(16, 48)] = 200 / 255  # the image is grey
    expected, numbers = model(x)[0].softmax(0).max(0)
    assert (classes, chances) == ((f"class {numbers}",), pytest.approx((expected.item(),), 1e-4))


@pytest.mark.parametrize(
    ("metadata", "options", "chances", "names"),
    [
        ({}, "--no-fold --impl plain", SOFTMAX, "class 2; class 1; class 0"),
        ({"labels": "multi"}, "--amp bf16 --channels-last", SIGMOID, "class 2; class 1; class 0"),
        ({"classes": FRUIT}, "--dtype bf16", SOFTMAX, "Pear; Apple, red; Apple, green"),
        (
            {"classes": CLASSES, "descriptions": ["crane, bird", "plum, Prunus", "crane"]},
            "",
            SOFTMAX,
            "crane; plum; crane, bird",
        ),
        (
            {"classes": CLASSES, "descriptions": FRUIT},
            "",
            SOFTMAX,
            "Pear; Apple, red; Apple, green",
        ),
    ],
)
def test_how_classes_are_named(metadata, options, chances, names, weights, image, tmp_path, capsys):
    """Only descriptions are shortened, to unique names, with every precision and implementation."""
    path = tmp_path / "a.pth"
    save_checkpoint(create(weights=weights), path, metadata=metadata)
    arguments = ["--weights", str(path), "--top-k", "3", *options.split()]
    assert run(["predict", str(image), str(image), *arguments]) == 0
    pairs = zip(names.split("; "), chances, strict=True)
    line = ", ".join(f"{name} ({chance} %)" for name, chance in pairs)
    assert capsys.readouterr().out == f"{image}: {line}\n" * 2


def test_convert_keeps_weights_and_classes_which_commands_read_once(
    weights, image, tmp_path, monkeypatch, capsys
):
    target, opening = tmp_path / "three.pth", Mock(wraps=safetensors.safe_open)
    monkeypatch.setattr(safetensors, "safe_open", opening)
    assert run(["convert", str(weights), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: tresnet_t, 3 classes, tresnet format\n"
    assert run(["predict", str(image), "--weights", str(weights)]) == 0
    assert opening.call_count == 2
    assert list(open_checkpoint(target).classes) == CLASSES
    assert same(*(create(weights=path).state_dict() for path in (weights, target)))


def test_convert_keeps_names_or_says_what_it_leaves_out(tmp_path, capsys):
    source, ours, timms = (tmp_path / f"{name}.pth" for name in ("source", "ours", "timms"))
    model = smallest("tresnet_s")
    model.pretrained_cfg |= {"input_size": (3, 96, 128), "crop_mode": "squash", "crop_pct": 0.9}
    words = ["nil", "ein", "zwei"]
    save_checkpoint(model, source, metadata={"classes": CLASSES, "descriptions": words})
    assert run(["convert", str(source), str(ours)]) == 0
    found = open_checkpoint(ours)
    assert (found.classes, found.descriptions) == (tuple(CLASSES), tuple(words))
    assert run(["convert", str(source), str(timms), "--format", "timm"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(", 3 classes, timm format\n")
    assert printed.err == (
        "left out, because timm's format cannot store it: input_size 96 x 128, crop_pct 0.9,"
        " crop_mode squash, interpolation bilinear, classes, descriptions\n"
    )
    assert open_checkpoint(timms).format == "timm"
