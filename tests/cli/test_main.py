import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import tresnet
from tests.engine.runs import closed_pipe, full_device
from tresnet.cli import shell
from tresnet.cli.commands import parse
from tresnet.cli.main import main as run
from tresnet.models import zoo
from tresnet.settings.fields import Settings, flatten

ROOT = Path(__file__).resolve().parents[2]


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tresnet {tresnet.__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "train eval list info bench predict convert"),
        ("bench max-batch", "MODEL --granularity --gpu-memory"),
        ("train", "tresnet train --data --recipe --resume --dry-run"),
    ],
)
def test_help_of_a_command(command, words, capsys):
    """Check three texts; test_pages.py compares all of them with docs/reference/commands.md."""
    with pytest.raises(SystemExit, match=r"^0$"):
        run([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert [word for word in words.split() if word not in text] == []


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("info --input-size 192 tresnet_m --num-classes 3", 192),
        ("export --input-size 192 256 tresnet_m --format pt2", (192, 256)),
        ("bench train --input-size 192 tresnet_m", 192),
        ("bench train --input-size 192 --rounds 3 -- tresnet_m", 192),
    ],
)
def test_an_input_size_does_not_take_the_model_after_it(line, size):
    command = parse(line.split())
    nested = [flatten(value) for value in command.keywords.values() if isinstance(value, Settings)]
    found = [group["input_size"] for group in (command.keywords, *nested) if "input_size" in group]
    assert found == [size]


def test_ctrl_c_is_exit_code_130_and_a_mistake_of_ours_a_traceback(monkeypatch, capsys):
    errors = [KeyboardInterrupt(), TypeError("a mistake of ours")]
    monkeypatch.setattr(zoo, "build", Mock(side_effect=errors))
    assert run(["info", "tresnet_t"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    with pytest.raises(TypeError, match="a mistake of ours"):
        run(["info", "tresnet_t"])


def test_a_home_directory_after_an_equals_sign_is_expanded(monkeypatch, capsys, tmp_path):
    """Shells expand `--runs ~/runs` and leave `--runs=~/runs`, which would be a directory `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["tresnet", "predict", "~x", "a=~/b", "--weights=~/my.pth"])
    assert shell.arguments()[1:] == ["~x", "a=~/b", f"--weights={tmp_path}/my.pth"]
    assert run() == 2
    assert f"no file of weights at {tmp_path}/my.pth" in capsys.readouterr().err


def test_help_imports_no_models_and_no_data():
    shown = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
    command = [sys.executable, "-c", f"{shown}from tresnet.cli.main import main; main(['--help'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    loaded = set(done.stdout.splitlines()[-1].split())
    late = ("timm", "torchvision", "PIL", "tresnet.measure", "tresnet.engine", "tresnet.data")
    # modules of options, which import no other late module
    options = {"tresnet.measure", "tresnet.measure.cases", "tresnet.measure.settings"}
    assert [name for name in loaded if name.startswith(late) and name not in options] == []
    assert {"tresnet.cli.main", "tresnet.errors"} <= loaded


@pytest.mark.parametrize(
    ("stream", "code", "words"),
    [
        (full_device, 2, "error: the output cannot be written: No space left on device\n"),
        (lambda: None, 0, ""),  # Python sets a closed stdout to None
        (closed_pipe, 141, ""),
    ],
)
def test_output_that_cannot_be_written(stream, code, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", stream())
    assert run(["--version"]) == code
    assert capsys.readouterr().err == words
    sys.stdout.close()  # as Python does when it exits


@pytest.mark.parametrize("command", ["-m tresnet.cli.main info tresnet_xl", "train.py"])
def test_ctrl_c_while_packages_are_imported(command):
    """Interrupt an import, which can then raise many types of errors."""
    command = [sys.executable, *command.split()]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"error: interrupted\n")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_has_no_bold_either(no_color):
    """Read a short help from a terminal, where the command prints styles without NO_COLOR."""
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "tresnet.cli.main", "list", "--help"], check=True, cwd=ROOT,
        stdout=theirs, env={**os.environ, "TERM": "xterm", "NO_COLOR": no_color}, timeout=60,
    )  # fmt: skip
    shown = os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert b"PATTERN" in shown
    assert (b"\x1b[" in shown) is (no_color == "")
