"""A run on images of four channels and 16 bits, and everything that reads its weights."""

import csv
import dataclasses
import json
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import tifffile
import torch
from PIL import Image
from torch.nn import functional

from tests.data.channel_files import CLASSES, make, write
from tests.engine.conftest import config_on
from tests.engine.runs import assert_same_run, at_calls
from tests.toys import smallest
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.push import push
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.engine import config as configs
from tresnet.engine.evaluate_weights import EvalConfig, run
from tresnet.engine.train import train
from tresnet.errors import CheckpointError, ConfigError, DataError, InputError, TrainingError
from tresnet.export import export_model
from tresnet.predictions import Predictor, predict
from tresnet.settings import ExportOptions
from tresnet.steps import TrainingStep

PLAIN = {"affine_degrees": 0.0, "affine_translate": 0.0, "affine_scale": (1.0, 1.0)}
OPTIONS = PLAIN | {"affine_shear": 0.0, "auto_augment": None, "in_chans": 4, "reprob": 0.5}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    write(root, train=26, val=11)
    return root


def config(root, runs, **changes):
    return config_on(root, runs, **OPTIONS | changes)


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    return train(config(root, tmp_path_factory.mktemp("runs"))).run_dir


@pytest.fixture(scope="module")
def weights(trained):
    return str(trained / "best.safetensors")


def pixels_of(path):
    read = np.load(path) if path.suffix == ".npy" else tifffile.imread(path)
    return read if read.shape[2] == 4 else read.transpose(1, 2, 0)


@pytest.fixture(scope="module")
def expected(root, weights):
    """Paths, labels and logits of the validation images, from files on without tresnet.data."""
    train_pixels = [pixels_of(path).reshape(-1, 4) for path in (root / "train").glob("*/*")]
    train_pixels = np.concatenate(train_pixels).astype(np.float64)
    model = create(weights=weights).eval()
    paths, labels, inputs = [], [], []
    for path in sorted((root / "val").glob("*/*")):
        image, planes = pixels_of(path), []
        short = min(image.shape[:2])
        rows, columns = (int(12 * side / short) for side in image.shape[:2])
        for index in range(4):
            plane = Image.fromarray(image[..., index].astype(np.float32))
            plane = plane.resize((columns, rows), Image.Resampling.BILINEAR)
            top, left = round((rows - 12) / 2), round((columns - 12) / 2)
            plane = np.asarray(plane)[top : top + 12, left : left + 12].astype(np.float64)
            own = train_pixels[:, index]
            planes.append((plane - own.mean()) / own.std())
        paths.append(str(path))
        labels.append(CLASSES.index(path.parent.name))
        inputs.append(np.stack(planes))
    inputs = torch.tensor(np.stack(inputs), dtype=torch.float32)
    with torch.no_grad():
        return paths, torch.tensor(labels), inputs, model(inputs)


def test_the_statistics_are_stored_with_the_weights(weights, capsys):
    cfg = open_checkpoint(weights).pretrained_cfg
    assert (cfg["pixel_dtype"], cfg["input_size"]) == ("uint16", (4, 12, 12))
    # those of `channel_files.make`: 40 * 100, and 100 * (index + 1), each but for brighter classes
    assert np.allclose(cfg["mean"], [4000 + 100 * n for n in (1, 2, 3, 0)], atol=30)
    assert 350 < cfg["std"][3] < 450
    assert main(["info", weights]) == 0
    assert "12x12, 4 channels of uint16, normalised by" in capsys.readouterr().out


def test_evaluation_agrees_with_an_independent_loop(root, weights, expected):
    _, labels, _, logits = expected
    given = {"data": str(root), "weights": weights, "device": "cpu", "workers": 1}
    found = run(EvalConfig(**given))
    assert found["loss"] == pytest.approx(functional.cross_entropy(logits, labels).item(), 1e-4)
    assert found["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())


def test_files_bytes_arrays_and_tensors_are_predicted_alike(root, weights, expected):
    paths, _, _, logits = expected
    chances = logits.double().softmax(1)
    predictor = Predictor(weights, top_k=3, device="cpu")
    found = [*predictor(root / "val")]
    assert [one.image for one in found] == paths
    for one, chance in zip(found, chances, strict=True):
        ranked = chance.sort(descending=True)
        assert one.numbers == tuple(ranked.indices.tolist())
        assert one.probabilities == pytest.approx(ranked.values.tolist(), rel=1e-4)
    with open(paths[0], "rb") as file:
        data = file.read()
    arrays = [make(0, 11000), torch.from_numpy(make(0, 11000)).permute(2, 0, 1)]
    for other in (data, *arrays):
        (alike,) = predictor(other)
        assert alike.probabilities == pytest.approx(found[0].probabilities, rel=1e-6)
    with pytest.raises(InputError, match=r"arrays \(H, W, 4\)"):
        list(predictor(Image.new("RGB", (8, 8))))
    with pytest.raises(InputError, match="expected weights for RGB with maps"):
        Predictor(weights, maps=True, device="cpu")


def test_bad_images_are_named_and_the_others_predicted(root, weights, tmp_path, capsys):
    np.save(tmp_path / "three.npy", make(0, 0, channels=3))
    np.save(tmp_path / "bytes.npy", make(0, 0, "uint8"))
    np.save(tmp_path / "good.npy", make(0, 0))
    Image.new("RGBA", (8, 8)).save(tmp_path / "image.png")
    names = [str(tmp_path), str(tmp_path / "image.png")]
    assert main(["predict", *names, "--weights", weights]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    for words in (
        "three.npy cannot be read (ValueError: expected 4 channels",
        "bytes.npy cannot be read (ValueError: expected pixels of uint16",
        "image.png cannot be read (ValueError: it is neither a TIFF nor a .npy file)",
    ):
        assert words in printed.err


def test_an_exported_file_states_the_normalisation(root, weights, expected, tmp_path, capsys):
    path, (paths, _, inputs, logits) = tmp_path / "four.onnx", expected
    assert main(["export", weights, "--format", "onnx", "--output", str(path)]) == 0
    stored = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    images = json.loads(stored["images"])
    cfg = open_checkpoint(weights).pretrained_cfg
    assert (images["channels"], images["pixel_dtype"]) == (4, "uint16")
    assert images["mean"] == list(cfg["mean"])
    assert images["std"] == list(cfg["std"])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": inputs.numpy()})
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    table = ["--top-k", "3", "--format", "csv"]
    rows = []
    for options in (["--weights", weights], ["--weights", str(path), "--runtime", "onnx"]):
        assert main(["predict", *paths, *options, *table]) == 0
        rows.append([*csv.reader(capsys.readouterr().out.splitlines())][1:])
    for one, other in zip(*rows, strict=True):
        assert one[:4] == other[:4]
        assert float(one[4]) == pytest.approx(float(other[4]), rel=1e-4)
    model = create(weights=weights).eval()
    with pytest.raises(InputError, match="expected input 'float' for pixels of uint16"):
        export_model(model, tmp_path / "b.onnx", ExportOptions(format="onnx", input="uint8"))


def test_a_resumed_run_measures_nothing_and_ends_alike(root, tmp_path, capsys):
    options = {"lr_schedule": "constant", "warmup_fraction": 0.0}
    whole = train(config(root, tmp_path / "whole", **options)).run_dir
    assert "measuring mean and deviation of 4 channels of 26 images" in capsys.readouterr().out
    changed = config(root, tmp_path / "parts", epochs=1, in_chans=4, **options)
    first = train(changed).run_dir
    capsys.readouterr()
    train(configs.replace(changed, epochs=2), resume=first)
    assert "measuring" not in capsys.readouterr().out
    assert_same_run(first, whole)


def test_weights_of_four_channels_train_on_with_their_normalisation(root, weights, tmp_path):
    again = train(config(root, tmp_path, in_chans=None, weights=weights, epochs=1)).run_dir
    assert configs.load(again / "config.json").shape.in_chans == 4
    names = ("mean", "std", "pixel_dtype")
    before, after = (
        open_checkpoint(p).pretrained_cfg for p in (weights, again / "best.safetensors")
    )
    assert [before[name] for name in names] == [after[name] for name in names]


def test_weights_for_rgb_become_weights_of_four_channels(root, finished, tmp_path):
    weights = str(finished / "best.safetensors")
    run_dir = train(config(root, tmp_path, weights=weights, epochs=1, mixup=0.0)).run_dir
    checkpoint = open_checkpoint(run_dir / "best.safetensors")
    assert checkpoint.config.in_chans == 4
    assert checkpoint.pretrained_cfg["pixel_dtype"] == "uint16"


def test_pixels_of_two_types_are_an_error_that_names_files(root, tmp_path):
    write(tmp_path / "data", train=6, val=3)
    np.save(tmp_path / "data" / "train" / "lake" / "bytes.npy", make(1, 0, "uint8"))
    with pytest.raises(DataError, match=r"one type in train, got uint16, such as .*; uint8, such"):
        train(config(tmp_path / "data", tmp_path / "runs"))
    (tmp_path / "data" / "train" / "lake" / "bytes.npy").unlink()
    write(tmp_path / "data", "uint8", val=3)
    with pytest.raises(DataError, match=r"val.*000.tif cannot be read .*expected pixels of uint16"):
        train(config(tmp_path / "data", tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_sheet_of_other_channels_is_refused_at_the_start(root, weights, tmp_path, capsys):
    image, sheet = str(next((root / "val").rglob("*.npy"))), tmp_path / "sheet.png"
    command = ["similar", image, str(root / "val"), "--weights", weights]
    assert main([*command, "--sheet", str(sheet)]) == 2
    printed = capsys.readouterr()
    assert "expected weights for RGB with --sheet" in printed.err
    assert "takes 4 channels: leave out --sheet" in printed.err
    assert printed.out == ""
    assert main(command) == 0


def test_a_full_memory_advises_no_prediction_for_rgb(root, tmp_path, monkeypatch):
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    at_calls(monkeypatch, TrainingStep, "backward", {1}, before=full)
    with pytest.raises(TrainingError, match="memory is full with --batch-size 4") as error:
        train(config(root, tmp_path))
    assert "max-batch" not in str(error.value)


def test_weights_without_statistics_are_refused(root, tmp_path):
    model = smallest(in_chans=4)
    path = tmp_path / "own.safetensors"
    save_checkpoint(model, path)
    with pytest.raises(CheckpointError, match=r"type, mean and deviation.*takes 4 channels"):
        predict(root / "val", weights=path)
    model.pretrained_cfg |= {"pixel_dtype": "uint16", "std": (1.0, 0.0, 1.0, 1.0)}
    with pytest.raises(InputError, match="expected mean and std of 4 channels"):
        save_checkpoint(model, path)


def test_a_pushed_model_keeps_its_normalisation(weights, tmp_path):
    push(open_checkpoint(weights), str(tmp_path / "pushed"), license="apache-2.0")
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "[0, 1]" not in card
    assert "pixels, 4 channels of uint16, normalised by their mean and deviation (mean 4" in card
    (tmp_path / "pushed" / "model.safetensors").rename(tmp_path / "whole.safetensors")
    state = create(weights=weights).state_dict()
    from safetensors.torch import save_file

    save_file(state, tmp_path / "pushed" / "model.safetensors")  # without metadata
    cfg = open_checkpoint(str(tmp_path / "pushed")).pretrained_cfg
    before = open_checkpoint(weights).pretrained_cfg
    assert all(cfg[name] == before[name] for name in ("mean", "std", "pixel_dtype"))


def test_a_split_of_another_type_is_an_error(root, weights, tmp_path):
    write(tmp_path, "uint8", val=3)
    given = EvalConfig(data=str(tmp_path), weights=weights, device="cpu", workers=0)
    with pytest.raises(DataError, match=r"000.tif cannot be read .*uint16, as the images"):
        run(given)
    assert run(dataclasses.replace(given, data=str(root)))["images"] == 11
    write(tmp_path / "other", val=3)
    (tmp_path / "other" / "val" / "lake").rename(tmp_path / "other" / "val" / "sea")
    with pytest.raises(ConfigError, match="expected only"):
        run(dataclasses.replace(given, data=str(tmp_path / "other")))
