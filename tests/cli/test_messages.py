"""Test the errors of commands for bad input: one line, exit code 2, and no file is written."""

import pytest
from PIL import Image

from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.models.zoo import build

# Command lines, each with words of its error message.
LINES = """
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
""".strip().splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with the image and the weights that the command lines name."""
    folder = tmp_path_factory.mktemp("messages")
    Image.new("L", (8, 8), 200).save(folder / "image", "PNG")
    (folder / "exported.onnx").touch()
    bad = build("tresnet_t", num_classes=3)
    save_checkpoint(bad, folder / "three.pth")
    save_checkpoint(build("tresnet_t", num_classes=0), folder / "headless.pth")
    bad.get_parameter("head.fc.bias").data[1] = float("nan")
    save_checkpoint(bad, folder / "nan.pth")
    return folder


@pytest.mark.parametrize("line", LINES)
def test_bad_input_is_one_line_and_exit_code_2(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    files = {path: path.read_bytes() for path in place.iterdir()}
    command, words = line.split(" | ")
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert {path: path.read_bytes() for path in place.iterdir()} == files
