"""Messages of train.py and eval.py about bad input: one each, with exit code 2."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import timm
import torch

from tests.engine.runs import eval_main, train_main, write_images
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
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
--recipe digits --teacher timm:resnet1 | unknown model of timm 'resnet1'
--recipe digits --teacher timm:test_resnet | --teacher timm:test_resnet: timm cannot give
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
"""
ABOUT_DIGITS = (
    "/WEIGHTS: the weights have 3 classes, the data 10",
    "data's classes (0, 1, 2, ...)",
)
EVAL = """
--data absent --weights WEIGHTS | absent is not a folder
--data DATA --weights WEIGHTS --split test | there is no folder 'test'
--data OTHER --weights WEIGHTS | weights have (blue, green, red), but the data also have cat
--data DATA --weights ended/last.pt | last.pt is the state of a run, which train.py --resume goes on
--data DATA --weights absent.safetensors | absent.safetensors
--data DATA --weights WEIGHTS --model tresnet_m | tresnet_m
--data DATA --weights diverged.safetensors | holds infinities or NaN, in head.fc
--data DATA --weights WEIGHTS --output absent/r.json | --output: there is no directory absent
--data DATA --weights WEIGHTS --output file | --output: file exists: choose another name
--data DATA --weights WEIGHTS --threshold 2 | --threshold: expected at most 1, got 2.0
"""
LINES = [
    (main, *line.split(" | "))
    for main, text in ((train_main, TRAIN), (eval_main, EVAL))
    for line in text.strip().splitlines()
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, data, finished):
    """A directory with data, weights and a file where a directory is meant; the digits in it."""
    folder = tmp_path_factory.mktemp("messages")
    shutil.copytree(data, folder / "DATA")
    write_images(folder / "OTHER", ("cat", "green", "red"), val=6)
    shutil.copy(finished / "best.safetensors", folder / "WEIGHTS")
    model = create(weights=finished / "best.safetensors")
    model.get_parameter("head.fc.bias").data[0] = torch.nan
    save_checkpoint(model, folder / "diverged.safetensors")
    (folder / "file").touch()
    (folder / "empty").mkdir()
    shutil.copytree(finished, folder / "ended")
    (folder / "ended" / "best.safetensors").unlink()
    (folder / "layers.json").write_text('{"model": {"layers": [1, 2]}}')
    return folder


@pytest.mark.parametrize(("main", "line", "words"), LINES, ids=[line for _, line, _ in LINES])
def test_bad_input_is_one_message_and_exit_code_2(place, monkeypatch, capsys, main, line, words):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=OSError("no network")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.chdir(place)
    if words not in ABOUT_DIGITS and "--data" not in line:  # opening the digits takes longer
        line = line.replace("--recipe digits", "--recipe digits --data DATA")
    arguments = line.replace("LONG", 300 * "n").split()
    if "--hierarchy" in arguments and arguments[-1][0] in "[{":
        Path("parents.json").write_text(arguments.pop())
        arguments.append("parents.json")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not Path("runs").exists()
