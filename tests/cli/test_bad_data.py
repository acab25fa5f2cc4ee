"""Test that commands refuse bad data: one line of error, exit code 2, and no new file."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.engine.runs import eval_main, small_model, train_main, write_images
from tests.hf import as_dataset
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.data.folder import open_folder

datasets = pytest.importorskip("datasets")
FILES = {"train": "train-00000-of-00001.parquet", "val": "validation-00000-of-00001.parquet"}
NUMBERS = datasets.Value("int64")


def parquet(change):
    """Return a function that writes the splits of `img`, changed as a dict, as Parquet files."""

    def write(root):
        for split, name in FILES.items():
            rows = as_dataset(open_folder(root / "img", split))
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
    parquet(lambda *unchanged: unchanged)(root)
    for file in (root / "set/data").iterdir():
        file.write_bytes(file.read_bytes()[:200])


def old_shards(root):
    for split in FILES:
        (root / "set").mkdir(exist_ok=True)
        (root / f"set/{split}.shards.json").write_text("{}")


def one_folder(root):
    for split in FILES:
        write_images(root / "set", ("blue",), **{split: 4})


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
    "a column that is no image": (
        parquet(lambda c, f: (c | {"image": c["label"]}, f | {"image": NUMBERS})),
        "one column of images in the split .* of .*set, got none among .*--image-column",
    ),
    "labels as strings": (
        parquet(
            lambda c, f: (
                c | {"label": ["a"] * len(c["label"])},
                f | {"label": datasets.Value("string")},
            )
        ),
        "one column of class labels in the split .* of .*set, got none among .*--label-column",
    ),
    "a row without image": (
        parquet(without_image),
        r"row 4, column image .*the row has no image.* --skip-bad-images",
    ),
    "one class": (
        parquet(
            lambda c, f: (
                c | {"label": [0] * len(c["label"])},
                f | {"label": datasets.ClassLabel(names=["a"])},
            )
        ),
        "at least two classes in column 'label' .* 1 classes",
    ),
    "one class folder": (
        one_folder,
        "at least two class folders in train and val, got blue: ad",
    ),
    "shards of an earlier version": (old_shards, "ArrayRecord .* write them anew .*tresnet shard"),
    "damaged Parquet": (damaged, "cannot open the data set .*set .*Parquet magic bytes not found"),
}
OPTIONS = {
    "no such split": (["--val-split", "test"], ["--split", "test"], ["--splits", "test"]),
    "no such configuration": ([["--data-config", "nope"]] * 3),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Return a directory with valid images and weights."""
    root = tmp_path_factory.mktemp("bad")
    write_images(root / "img", train=9, val=6)
    save_checkpoint(small_model(), root / "weights.safetensors")
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


@pytest.mark.parametrize("case", CASES)
def test_bad_data_are_one_error_and_nothing_is_written(
    case, valid, hub, own_cache, tmp_path, monkeypatch, capsys
):
    write, message = CASES[case]
    for name in ("img", "weights.safetensors"):
        (tmp_path / name).symlink_to(valid / name)
    data = "set"
    if callable(write):
        write(tmp_path)
    else:
        data = "hf-hub:a/b"
        hub(write)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    small = "--recipe digits --model tresnet_t --width-factor 0.125 --input-size 12 --batch-size 4"
    commands = (
        (train_main, f"{small} --device cpu --workers 0 --data {data}"),
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
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
