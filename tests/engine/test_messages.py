"""Messages of all programs about bad input: one each, with exit code 2, and no file is written."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import timm
import torch
from PIL import Image

from tests.data.channel_files import write as write_channels
from tests.engine.runs import eval_main, train_main, write_images
from tests.forks import run_forked
from tests.toys import smallest
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main as tresnet_main
from tresnet.ops import dispatch

# Command lines, and words of their message. DATA has three classes, WEIGHTS are of a run on it;
# OTHER has another class, and the run `ended` has lost its best weights.
TRAIN = """
--recipe papper | unknown recipe 'papper': did you mean 'paper'?
--recipe digits --model tresnet_n | unknown model 'tresnet_n'
--recipe digits --weights tresnet_m.mil | unknown weights 'tresnet_m.mil'
--recipe digits --weights absent.pth | absent.pth
--recipe digits --device tpu | --device: expected a device such as cpu or cuda:0, got 'tpu'
--data absent --workers 0 --device cpu | absent is not a folder: check --data
--data DATA/train --workers 0 --device cpu | there is no folder 'train'
--recipe digits --input-size 33 | expected height and width divisible by 2, got (33, 33)
--recipe digits --train-only layer5 head | expected parts of the model (stem, layer1, layer2, layer
--recipe digits --freeze-epochs 2 --train-only layer4 --epochs 3 | expected head among the parts of
--recipe digits --freeze-epochs 3 --epochs 3 | expected fewer than the 3 epochs of --epochs, got 3
--data DATA --weights tresnet_t.digits --train-only layer4 --device cpu | the head is new, as
--data DATA --model tresnet_t --train-only layer4 --device cpu | no --weights are given: expected
--recipe digits --sync-bn | on GPUs only, expected a GPU, got cpu: leave the option out
--resume absent | --resume: expected the directory of a run, got nothing at absent
--resume file | --resume: expected the directory of a run, got a file at file
--resume empty | no readable config.json of a run at empty
--resume ended | ended/best.safetensors is missing, the best weights of epoch 2: put the file back
--config layers.json --recipe digits | --config: expected no --recipe and no --resume beside it
--config layers.json --resume auto | --config: expected no --recipe and no --resume beside it
--config empty | no readable config.json of a run at empty
--config layers.json | layers.json: layers: expected more values, got (1, 2)
--recipe digits --resume absent | --resume: expected the directory of a run, got nothing at absent
--recipe digits --resume auto | --resume auto: expected --name
--recipe digits --resume empty | expected a checkpoint to resume from in empty, found none
--recipe digits --runs . --name ended | --name: the run directory ended exists, and a run never
--recipe digits --runs . --name DATA --resume auto | --name: DATA exists and is not a run's
--recipe digits --name a/b | --name: expected a directory name without a path
--recipe digits --dry-run --name LONG | --name: expected a directory name without a path, of at most
--recipe digits --dry-run --impl triton --device cpu | impl='triton' needs a tensor on a GPU
--recipe digits --lr 1e308 | --lr: expected at most 1000000000000000, got 1e+308
--recipe digits --runs file/runs --name new --epochs 1 | file/runs: Not a directory
--recipe digits --batch-size auto | expected a GPU whose memory decides, got device cpu
--recipe digits --batch-size auto --dry-run | memory max-batch MODEL --gpu-memory 24GiB
--recipe digits --batch-size auto --gpu-memory 8gigs | --gpu-memory: expected a size such as '80GiB'
--recipe digits --batch-size auto --gpu-memory 10 | --gpu-memory: expected a size such as '80GiB'
--recipe digits --teacher WEIGHTS | /WEIGHTS: the weights have 3 classes, the data 10
--recipe digits --teacher five.pth --class-map map.txt | five.pth, got 3: check --class-map
--recipe digits --teacher timm:resnet1 | unknown model of timm 'resnet1'
--recipe digits --teacher timm:test_resnet | --teacher: timm:test_resnet: timm cannot give
--recipe paper | --data: say what to train on
--recipe finetune --data DATA | --model: say which model to train
--recipe finetune --data DATA | --weights: the recipe finetune needs weights
--data DATA --batch-size 4 --input-size 32 --device cpu --teacher diverged.safetensors | holds infin
--data DATA --device cpu --weights diverged.safetensors | holds infinities or NaN, in head.fc
--recipe usi --data DATA | --teacher: the recipe usi needs a teacher: a tag, a file or timm:N
--recipe digits --new-head | --new-head replaces the head of --weights, but no weights
--recipe digits --mixup 0.2 --batch-size 3 | --batch-size: mixup and cutmix pair images
--recipe digits --recompute none --norm batchnorm | none: expected --norm abn, got batchnorm
--recipe digits --accumulate 2 --compile reduce-overhead | --accumulate: PyTorch loses gradients
--recipe digits --runs l\udcfcufe | --runs: expected printable UTF-8 text, got 'l\\udcfcufe'
--recipe digits --name a\0b | --name: expected printable UTF-8 text, got 'a\\x00b'
--recipe digits --progressive-sizes 64 128 --epochs 1 | expected at most as many sizes as the 1 ep
--recipe digits --epochs 9 --mix-off-epochs 10 | --mix-off-epochs: expected at most the 9 epochs
--recipe digits --sync-bn --impl triton | run without the kernels, got --impl triton
--recipe digits --sync-bn --norm inplace_abn | only --norm abn and batchnorm can be synchronised
--recipe digits --teacher a.pth --loss bce | --teacher: expected --loss cross-entropy or one-
--recipe digits --loss semantic-softmax | --hierarchy: --loss semantic-softmax needs a JSON file
--recipe digits --loss semantic-softmax --mixup 0.2 | needs one class per image: expected no --mixup
--recipe digits-multilabel --mixup 0.2 | --loss asymmetric takes labels as they are
--recipe digits-multilabel --label-smoothing 0.1 | --loss asymmetric takes labels as they are
--recipe digits --loss semantic-softmax --hierarchy no.json | --hierarchy: no readable JSON in
--recipe digits --loss semantic-softmax --hierarchy [3] | --hierarchy: expected a JSON object from
--recipe digits --loss semantic-softmax --hierarchy {"1":3} | --hierarchy: expected a JSON object
--recipe digits --loss semantic-softmax --hierarchy {"1":"3","3":"1"} | '1' is its own ancestor
--recipe digits --loss semantic-softmax --hierarchy {"dog":"cat"} | data's classes (0, 1, 2, ...)
--recipe digits --loss one-vs-all --class-weights balanced | --loss cross-entropy, bce, asymmetric
--data x --model tresnet_t --aa rand-m9-mstd0.5 | here --aa is --auto-augment (see the table
--data x --model tresnet_t --aa=v0 --smoothing=0.1 | --smoothing is --label-smoothing
--data x --model tresnet_t --warmup_epochs 5 | here --warmup-epochs is --warmup-fraction, a fraction
--data x --model tresnet_t --output x -b 64 | here --output is --runs; -b is --batch-size (see
OF_FOUR --auto-augment v0 | turn them off by --auto-augment None
OF_FOUR --teacher timm:resnet18 | --teacher: expected images in RGB, got --in-chans 4
OF_FOUR --in-chans 0 | --in-chans: expected at least 1
OF_FOUR --in-chans 5 | expected 5 channels, so the shape
"""
OF_FOUR = """--recipe digits --data FOUR --in-chans 4 --affine-degrees 0 --affine-translate 0
    --affine-scale 1 1 --affine-shear 0 --batch-size 4 --device cpu --workers 0"""
ABOUT_DIGITS = (
    "/WEIGHTS: the weights have 3 classes, the data 10",
    "data's classes (0, 1, 2, ...)",
    "'1' is its own ancestor",
)
EVAL = """
--data absent --weights WEIGHTS | absent is not a folder
--data DATA --weights WEIGHTS --split test | there is no folder 'test'
--data OTHER --weights WEIGHTS | weights have (blue, green, red), but the data also have cat: rename
--data DATA --weights WEIGHTS timm:resnet10t --model tresnet_t | expected one name in --weights
--data DATA --weights WEIGHTS timm:resnet10t --per-class new | expected one name in --weights
--data DATA --weights WEIGHTS timm:resnet10t --find-thresholds | expected one name in --weights
--data DATA --weights WEIGHTS --csv table.csv | --csv: expected several names in --weights
--data DATA --weights timm:resnet10t --model tresnet_t | --model: timm:resnet10t names its model
--data DATA --weights ended/last.pt | last.pt is the state of a run, which train.py --resume goes on
--data DATA --weights absent.safetensors | absent.safetensors
--data DATA --weights WEIGHTS --model tresnet_m | tresnet_m
--data DATA --weights diverged.safetensors | holds infinities or NaN, in head.fc
--data DATA --weights WEIGHTS --output absent/r.json | --output: there is no directory absent
--data DATA --weights WEIGHTS --output file | --output: file exists: choose another name
--data x --checkpoint a.pth --valid-labels a --output r | --valid-labels is --only-data-classes (see
--data DATA --weights WEIGHTS --threshold 2 | --threshold: expected at most 1, got 2.0
"""
TRESNET = """
list resnet* | expected a pattern that matches a model, got 'resnet*'
info tresnet_q | unknown model 'tresnet_q': did you mean 'tresnet_
info tresnet_m --input-size 225 | divisible by 4
demo tresnet_t.digits --port 99999 | --port: expected at most 65535, got 99999
export no_such_model --format pt2 | no_such_model
memory predict tresnet_t --compile default | compile: expected none, got default
memory predict tresnet_t --opt sgdd | --opt: timm builds no optimizer 'sgdd'
memory predict tresnet_t --gpu-memory lots | expected a size such as '80GiB'
bench train --device cpu | at least one model to measure, got none
bench train tresnet_t --device cpu --opt sgdd | --opt: timm builds no optimizer 'sgdd'
bench max-batch tresnet_t --device cpu --at-most 64 --gpu-memory lots | a size such as '80GiB'
bench train tresnet_t@speed=high --device cpu | tresnet_t: unknown setting 'speed'
bench train tresnet_t --device cpu --batch-size | expected at least one batch size, got none
bench train tresnet_t --device cpu --input-size 33 | divisible by 2
bench train tresnet_t --device meta | expected a device that computes
bench infer tresnet_t --device cuda:99 | expected a device of this machine
bench infer tresnet_t --device cpu --output-dir image | expected a directory that records can be
bench max-batch tresnet_t --device cpu --at-most 64 --output-dir image/sub | expected a directory
bench max-batch tresnet_t --device cpu | expected --at-most on cpu, got none
predict image --weights tresnet_m.miil_in2k | did you mean 'tresnet_m.miil_in
predict image --weights missing.safetensors | missing.safetensors
predict image --weights nan.pth | holds infinities or NaN, in head.fc.bias
predict image --weights headless.pth | expected weights of a classifier
predict image --weights exported.onnx | expected weights, got the exported file exported.onnx
predict image --weights three.pth --runtime onnx | is not a model written by tresnet
predict FOUR/train/lake/001.npy --weights three.pth | it is a NumPy array
predict no*.png --weights three.pth | expected images (jpg, png, ...) at no*.png, found none
predict image --weights three.pth --cam . | expected a new directory for --cam, but . exists
predict --weights three.pth | expected at least one image file, got none
convert three.pth new.pth --model tresnet_m | holds tresnet_t, got name='tresnet_m'
convert three.pth new.onnx | expected a file name ending in
convert three.pth new.pth --format timm | block_size=2
convert three.pth no/new.pth | no does not exist
convert three.pth image | image exists
convert image new.safetensors | image
export nan.pth --format pt2 | holds infinities or NaN, in head.fc.bias
push three.pth new --license nope | expected an SPDX identifier such as apache-2.0, got 'nope'
memory predict tresnet_t --snapshot no/a.pickle | cannot write no/a.pickle: the directory
push nan.pth new --license mit | holds infinities or NaN, in head.fc.bias
"""
BENCHMARKS = """
ops.py abn --batch-size 1 | --batch-size: expected at least 2, got 1
loaders.py --rounds 0 | --rounds: expected at least 1, got 0
profile_step.py tresnet_t --device cuda:99 | expected a device of this machine
host_time.py --rounds 0 | --rounds: expected at least 1, got 0
memory_accuracy.py --device cuda:99 | expected a device of this machine
"""


def start(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / script), run_name="__main__")


def benchmarks_main(words: list[str]) -> int | None:
    """Run a script in a process of its own, because some set environment variables for Triton."""
    ended = run_forked(start, *words, folder=Path.cwd())
    sys.stderr.write(ended.stderr)
    return ended.returncode


PROGRAMS = {train_main: TRAIN, eval_main: EVAL, tresnet_main: TRESNET, benchmarks_main: BENCHMARKS}
LINES = [
    (main, *line.split(" | ")) for main, text in PROGRAMS.items() for line in text.split("\n")[1:-1]
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, data, digits_folder, finished):
    """A directory with everything that the command lines name."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "data").symlink_to(digits_folder.parent)
    shutil.copytree(data, folder / "DATA")
    write_channels(folder / "FOUR", train=6, val=3)
    write_images(folder / "OTHER", ("cat", "green", "red"), val=6)
    shutil.copy(finished / "best.safetensors", folder / "WEIGHTS")
    shutil.copytree(finished, folder / "ended")
    (folder / "ended" / "best.safetensors").unlink()
    for name in ("file", "exported.onnx"):
        (folder / name).touch()
    (folder / "empty").mkdir()
    (folder / "layers.json").write_text('{"model": {"layers": [1, 2]}}')
    Image.new("L", (8, 8), 200).save(folder / "image", "PNG")
    save_checkpoint(smallest(num_classes=0), folder / "headless.pth")
    (folder / "map.txt").write_text("red\ngreen\nblue")
    save_checkpoint(smallest(num_classes=5), folder / "five.pth")
    three = smallest()
    save_checkpoint(three, folder / "three.pth")
    trained = create(weights=finished / "best.safetensors")
    for model, name in ((three, "nan.pth"), (trained, "diverged.safetensors")):
        model.get_parameter("head.fc.bias").data[0] = torch.nan
        save_checkpoint(model, folder / name)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files' contents; `Path.rglob` follows no link to a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in paths}


@pytest.mark.parametrize(("main", "line", "words"), LINES, ids=[line for _, line, _ in LINES])
def test_bad_input_is_one_message_and_exit_code_2(place, monkeypatch, capsys, main, line, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if main is train_main:
        monkeypatch.setattr(timm, "create_model", Mock(side_effect=OSError("no network")))
        monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.chdir(place)
    if words not in ABOUT_DIGITS and "--data" not in line:  # opening the digits takes longer
        line = re.sub("--recipe digits(?= |$)", r"\g<0> --data DATA --batch-size 4", line)
    arguments = line.replace("LONG", 300 * "n").replace("OF_FOUR", OF_FOUR).split()
    if "--hierarchy" in arguments and arguments[-1][0] in "[{":
        Path("parents.json").write_text(arguments.pop())
        arguments.append("parents.json")
    before = contents(place)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    error = printed.err
    if main is benchmarks_main:  # torch's own warnings may precede it
        error = error.splitlines(keepends=True)[-1]
    assert error.startswith("error: ")
    assert words in error
    assert "Traceback" not in printed.err
    if main is tresnet_main:
        assert (printed.out, error.count("\n")) == ("", 1)
    assert contents(place) == before
