import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli import info, main
from tresnet.cli.main import main as run
from tresnet.cli.output import format_table
from tresnet.env import package_version
from tresnet.models.zoo import build

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("list", "info", "bench", "predict", "convert")


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tresnet {package_version()}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(["--help"])
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"• {name} " not in text] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("list", "PATTERN"),
        ("info", "MODEL --input-size --num-classes"),
        ("bench", "train infer max-batch ops report"),
        ("bench max-batch", "MODEL --granularity --memory-gib"),
        ("bench ops", "[OP --rounds --time-limit-s"),
        ("bench report", "--into --pictures --picture-format {svg,png}"),
        ("bench train", "MODEL --batch-size --amp --compile --norm --sequential"),
        ("predict", "IMAGE --weights --top-k --format {table,json,csv}"),
        ("convert", "IN OUT --format {tresnet,timm} --model"),
        ("export", "MODEL --format {onnx,pt2,aoti,openvino} --int8"),
    ],
)
def test_help_of_a_command(command, words, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert [word for word in words.split() if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "Unrecognized options: lst"),
        (
            ["bench"],
            "Expected one of {train, infer, max-batch, ops, loader, report}",
        ),
        (["bench", "train", "tresnet_t", "--batch-size", "many"], "many"),
        (["predict", "image.png"], "--weights"),
        ([], "Missing subcommand"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        run(arguments)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert run(["info", "tresnet_q"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: unknown model 'tresnet_q'; did you mean 'tresnet_")
    assert printed.err.count("\n") == 1


def test_ctrl_c_is_exit_code_130_and_a_mistake_of_ours_a_traceback(monkeypatch, capsys):
    def ending(error):
        def end(self, argv):
            raise error

        monkeypatch.setattr(info.Info, "run", end)
        return run(["info", "tresnet_t"])

    assert ending(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    with pytest.raises(TypeError, match="a mistake of ours"):
        ending(TypeError("a mistake of ours"))


def test_program_exits_with_the_code():
    """The entry point in a process of its own, warnings being errors."""
    command = [sys.executable, "-W", "error", "-m", main.__name__, "info", "tresnet_q"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert result.stderr.startswith("error: unknown model")


def test_help_imports_no_models_and_no_data():
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from tresnet.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "added = set(sys.modules) - before\n"
        "print(*(m for m in added if m.startswith(('tresnet.', 'timm', 'torchvision', 'PIL'))))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    loaded = result.stdout.splitlines()[-1].split()
    assert "tresnet.cli.main" in loaded
    own = {"tresnet.cli", "tresnet.errors"}
    late = ("timm", "torchvision", "PIL", "tresnet.measure", "tresnet.engine", "tresnet.data")
    # which import nothing themselves
    options = {"tresnet.measure", "tresnet.measure.cases", "tresnet.measure.settings"}
    assert [name for name in loaded if name.startswith(late) and name not in options] == []
    assert own <= {name for name in loaded if name.startswith("tresnet")}


def tresnet(*arguments, code="", **kwargs):
    """The command in a process of its own, after `code`."""
    program = f"import os, sys\nfrom tresnet.cli.main import main\n{code}\nsys.exit(main())"
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, **kwargs)


def test_text_that_the_output_cannot_take(tmp_path):
    """A class called u-umlaut under ASCII, and a file whose name is no UTF-8."""
    torch.manual_seed(0)
    path, image = tmp_path / "a.safetensors", os.fsencode(tmp_path) + b"/\xff.png"
    save_checkpoint(build("tresnet_t", num_classes=1), path, metadata={"classes": ["\u00fc"]})
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", image)
    arguments = ["predict", image, b"\xfe.png", "--weights", path]
    result = tresnet(*arguments, env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert result.stdout.endswith(b"\\udcff.png: \\xfc (100.0 %)\n")
    assert result.stderr.startswith(b"error: expected an image, but \\udcfe.png cannot be read")
    assert (result.stderr.count(b"\n"), result.returncode) == (1, 2)


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [
        ("/dev/full", 2, b"error: the output cannot be written: No space left on device\n"),
        pytest.param("closed", 0, b"", marks=pytest.mark.slow),
        ("gone", 141, b""),
    ],
)
def test_output_that_cannot_be_written(redirect, code, words):
    ends = {
        "/dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
        "closed": "sys.stdout = None",
        "gone": "end, write = os.pipe(); os.close(end); os.dup2(write, 1)",
    }
    result = tresnet("list", "*_t", code=ends[redirect])
    assert (result.returncode, result.stderr) == (code, words)


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_ctrl_c_at_any_moment(after_s):
    """While packages are imported, too: what is interrupted there can fail in many ways."""
    program = "from tresnet.cli.main import main\nprint(flush=True)\nexit(main())"
    command = [sys.executable, "-c", program, "info", "tresnet_xl"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe) as process:
        process.stdout.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    if after_s > 0:  # the handler may not have been there yet
        assert (process.returncode, errors) == (130, b"error: interrupted\n")
    assert process.returncode != 0


def test_no_color_has_no_bold_either():
    """On a terminal, where there are styles."""
    shown = {}
    for value in ("", "1"):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "NO_COLOR": value, "TERM": "xterm"}
        command = [sys.executable, "-m", main.__name__, "--help"]
        subprocess.run(command, cwd=ROOT, stdout=theirs, env=environment, check=True, timeout=100)
        os.close(theirs)
        shown[value] = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 65536):
                shown[value] += chunk
        os.close(ours)
    assert b"\x1b[" in shown[""]
    assert b"\x1b[" not in shown["1"]
    assert b"predict" in shown["1"]


def test_table_aligns_numbers_right_and_words_left():
    table = format_table(["model", "n"], [["tresnet_t", "7"], ["b", "1,000.5"], ["c", "-"]])
    assert table.splitlines() == [
        "model            n",
        "tresnet_t        7",
        "b          1,000.5",
        "c                -",
    ]
    assert format_table(["a", "b"], []) == "a  b"
