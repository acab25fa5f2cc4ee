"""Test that commands refuse bad data: one line of error, exit code 2, and no new file."""

import json
import re
import shutil
import threading
import unicodedata
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from tests.engine.runs import CLASSES, eval_main, train_main, write_images
from tests.hf import as_dataset
from tests.toys import smallest
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.data.sources import open_split

datasets = pytest.importorskip("datasets")
OUTPUTS = ["red", "blue", "green"]  # classes of weights, in the order of their outputs
ACCENTS = {"blue": "bébé", "green": "café", "red": "forêt"}
SMALL = "--recipe digits --model tresnet_t --width-factor 0.125 --input-size 12 --batch-size 4"
FILES = {"train": "train-00000-of-00001.parquet", "val": "validation-00000-of-00001.parquet"}


def parquet(change):
    """Return a function that writes the splits of `img`, changed as a dict, as Parquet files."""

    def write(root):
        for split, name in FILES.items():
            rows = as_dataset(open_split(root / "img", split))
            rows = rows.cast_column("image", datasets.Image(decode=False))
            columns, features = change(rows.to_dict(), dict(rows.features))
            features = datasets.Features(features)
            changed = datasets.Dataset.from_dict(columns, features)
            (root / "set/data").mkdir(parents=True, exist_ok=True)
            changed.to_parquet(root / "set/data" / name)

    return write


def without_image(columns, features):
    columns["image"][4] = None
    return columns, features


def damaged(root):
    GOOD(root)
    for file in (root / "set/data").iterdir():
        file.write_bytes(file.read_bytes()[:200])


def one_folder(root):
    for split in FILES:
        write_images(root / "set", ("blue",), **{split: 4})


def one_dataset(name, split):
    """Return a function that writes one split by `save_to_disk`, alone in the folder `name`."""

    def write(root):
        rows = as_dataset(open_split(root / "img", "train"))
        datasets.Dataset(rows.data, split=split).save_to_disk(root / name)

    return write


GOOD = parquet(lambda *unchanged: unchanged)
# The fault; a function that writes the data set `set`, or the hub's answer to a request for
# hf-hub:a/b (None: the hub cannot be reached); and a pattern of the message.
CASES = {
    "no such folder": (lambda root: None, "set is not a folder: check --data"),
    "an empty folder": (lambda root: (root / "set").mkdir(), "which holds: none"),
    "no such data set": ((404, "RepoNotFound"), "'a/b' doesn't exist on the Hub or cannot be acc"),
    "gated, no token": ((401, "GatedRepo"), "'a/b' is a gated dataset on the Hub.*hf auth login"),
    "no network": (None, "Couldn't reach 'a/b' on the Hub .*data on the hub need a network"),
    "no such split": (GOOD, "expected a split 'test' in .*set, got train, validation: name"),
    "no such configuration": (GOOD, r"'nope' not found\. Available: \['default'\]"),
    "a row without image": (
        parquet(without_image),
        r"row 4, column image .*the row has no image.* --skip-bad-images",
    ),
    "one class folder": (one_folder, "at least two class folders in train and val, got blue: ad"),
    "one Dataset for all splits": (
        one_dataset("set", None),
        "expected a split '(val|nope)' in .*set, got train: name another by",
    ),
    "a Dataset of a named split": (
        one_dataset("set", datasets.Split("test[:50%]")),
        "expected a split '(train|nope)' in .*set, got test: name another by",
    ),
    "a Dataset with a split's name": (
        one_dataset("set/train", datasets.Split.TRAIN),
        "expected a split '(val|nope)' in .*set, got train: name another by",
    ),
    "a file": (lambda root: (root / "set").touch(), "a directory, got the file .*set: name"),
    "damaged Parquet": (damaged, "cannot open the data set .*set .*Parquet magic bytes not found"),
}
OPTIONS = {
    "no such split": (["--val-split", "test"], ["--split", "test"], ["--splits", "test"]),
    "no such configuration": ([["--data-config", "nope"]] * 3),
    "one Dataset for all splits": ([], ["--split", "nope"], []),
    "a Dataset with a split's name": ([], ["--split", "nope"], []),
    "a Dataset of a named split": ([], ["--split", "nope"], []),
}


def named(root, form=None):
    """Write the images in folders whose names have accents, in a Unicode form for each split."""
    for split, own in (("train", "NFC"), ("val", form or "NFD")):
        for name in CLASSES:
            folder = root / "set" / split / unicodedata.normalize(own, ACCENTS[name])
            shutil.copytree(root / "img" / split / name, folder)


def nested(root):
    GOOD(root)
    (root / "set/data").rename(root / "deep")
    (root / "set/a/b").mkdir(parents=True)
    (root / "deep").rename(root / "set/a/b/c")


def beside_hidden(root):
    GOOD(root)
    for place in ("set/train/.ipynb_checkpoints", "set/.git/val/red", "set/val/.cache"):
        (root / place).mkdir(parents=True)
        shutil.copy(next((root / "img/val/red").iterdir()), root / place / "copy.png")


def labelled(kind, convert):
    """Return a function that writes Parquet with converted labels."""

    def change(columns, features):
        labels = [convert(CLASSES[label]) for label in columns["label"]]
        return columns | {"label": labels}, features | {"label": datasets.Value(kind)}

    return parquet(change)


# Data that are read as the folder `img` is. Weights with names have other orders than the data.
UNUSUAL = {
    "texts": (labelled("string", str), True),
    "floats": (labelled("float64", lambda name: float(CLASSES.index(name))), False),
    "numbers of named outputs": (labelled("int64", OUTPUTS.index), True),
    "names in two forms of Unicode": (named, False),
    "Parquet three levels deep": (nested, True),
    "hidden folders beside Parquet": (beside_hidden, True),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Return a directory with valid images and weights."""
    root = tmp_path_factory.mktemp("bad")
    write_images(root / "img", train=9, val=6)
    model = smallest()
    save_checkpoint(model, root / "weights.safetensors")
    save_checkpoint(model, root / "named.safetensors", metadata={"classes": OUTPUTS})
    return root


@pytest.fixture
def hub(monkeypatch):
    """Return a function that starts a local server for the hub, which refuses each request."""
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                status, code = answer
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.end_headers()

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        url = f"http://127.0.0.1:{servers[0].server_address[1]}"
        if answer is None:
            servers.pop().server_close()  # so that no server listens at this port
            monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda s: None)
        else:
            threading.Thread(target=servers[0].serve_forever).start()
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", url)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def here(valid, own_cache, tmp_path, monkeypatch):
    """Enter a new directory with the valid images and weights."""
    for path in valid.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_bad_data_are_one_error_and_nothing_is_written(case, here, hub, capsys):
    write, message = CASES[case]
    data = "set"
    if callable(write):
        write(here)
    else:
        data = "hf-hub:a/b"
        hub(write)
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    commands = (
        (train_main, f"{SMALL} --device cpu --workers 0 --data {data}"),
        (eval_main, f"--weights weights.safetensors --device cpu --workers 0 --data {data}"),
        (main, f"shard {data} out --workers 1"),
    )
    if case == "one class folder":
        commands = commands[:1]  # evaluation and shards may have one class
    for (command, words), options in zip(commands, OPTIONS.get(case, ([],) * 3), strict=False):
        capsys.readouterr()
        assert command([*words.split(), *options]) == 2
        error = capsys.readouterr().err.rpartition("error: ")[2]
        assert error.count("\n") == 1
        assert re.search(message, error), error
        assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_data_give_the_results_of_the_folder(case, here):
    write, has_names = UNUSUAL[case]
    write(here)
    weights = "named.safetensors" if has_names else "weights.safetensors"
    common = f"--weights {weights} --device cpu --workers 0 --no-progress"
    results = []
    for data in ("img", "set"):
        assert eval_main(f"--data {data} {common} --output {data}.json") == 0
        results.append(json.loads(Path(f"{data}.json").read_text()))
    assert results[1]["images"] == results[0]["images"] == 6
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
    assert train_main(f"{SMALL} --device cpu --workers 0 --data set --dry-run") == 0
    assert main(["shard", "set", "out", "--workers", "1"]) == 0
    shards = [open_split("out", split) for split in ("train", "val")]
    assert shards[0].classes == shards[1].classes
    assert [len(split) for split in shards] == [9, 6]


def test_numbers_are_outputs_of_named_weights_only_in_evaluation(here, capsys):
    labelled("int64", OUTPUTS.index)(here)
    weights = "named.safetensors"
    Path("map.txt").write_text("\n".join(OUTPUTS))
    common = "--data set --device cpu --workers 0 --no-progress"
    line = "labels of the data are numbers of the weights' outputs: 0 is red, 1 is blue, 2 is gree"
    for options, said in (("", True), (" --class-map map.txt", False)):
        assert eval_main(f"{common} --weights {weights}{options}") == 0
        assert (line in capsys.readouterr().out) == said
        run = f"{common} --recipe digits --batch-size 4 --epochs 1 --input-size 12 --runs runs"
        assert train_main(f"{run} --weights {weights}{options} --dry-run") == 0
        reason = "head new, as the labels of the data are numbers, those of the weights names (red"
        assert (reason in capsys.readouterr().err) == said
        teacher = f"--model tresnet_t --width-factor 0.125 --teacher {weights}"
        assert train_main(f"{run} {teacher}{options} --dry-run") == (2 if said else 0)
        assert ("the labels of the data are numbers" in capsys.readouterr().err) == said


def test_an_export_matches_classes_by_name(here, capsys):
    """The weights' outputs are in another order than the folders, and val lacks a class."""
    shutil.copytree("img", "set")
    weights = "named.safetensors"
    for number in range(2):
        words = f"--data set --weights {weights} --device cpu --workers 0 --output out{number}.json"
        assert eval_main(words) == 0
        top1 = json.loads(Path(f"out{number}.json").read_text())["top1"]
        exported = ["export", weights, "--format", "pt2", "--data", "set"]
        assert main([*exported, "--output", f"{number}.pt2"]) == 0
        assert f"{top1:.2f} %" in capsys.readouterr().out.rpartition("the model's")[2]
        shutil.rmtree("set/val/green", ignore_errors=True)
    Path("set/val/red").rename("set/val/grey")
    assert main([*exported, "--output", "2.pt2"]) == 2
    assert "(red, blue, green), but the data also have grey: rename" in capsys.readouterr().err


def test_a_large_picture_is_refused_unless_the_limit_is_raised(
    valid, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # Pillow refuses images above twice this
    common = f"--data {valid / 'img'} --device cpu --workers 0 --no-progress"
    run = f"{common} {SMALL} --epochs 1 --runs {tmp_path} --name run"
    for command, words in (
        (eval_main, f"{common} --weights {valid / 'weights.safetensors'}"),
        (main, f"shard {valid / 'img'} {tmp_path / 'out'} --workers 1"),
        (train_main, run),
    ):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
        assert command(words.split()) == 2
        error = capsys.readouterr().err
        assert re.search(
            "DecompressionBombError.*or if you trust it, raise .*--max-image-pix", error
        )
        if command is train_main:
            words = f"--resume {tmp_path / 'run'}"
        assert command([*words.split(), "--max-image-pixels", "20000"]) == 0
