import subprocess
import sys
from pathlib import Path

import pytest

from tresnet.cli import info, main
from tresnet.cli.main import main as run
from tresnet.cli.output import format_table
from tresnet.env import package_version

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
    ("arguments", "words"),
    [
        (["list", "--help"], ["PATTERN"]),
        (["info", "--help"], ["MODEL", "--input-size", "--num-classes"]),
        (["bench", "--help"], ["train", "infer", "max-batch", "ops", "report"]),
        (["bench", "max-batch", "--help"], ["MODEL", "--granularity", "--memory-gib"]),
        (["bench", "ops", "--help"], ["[OP ...]", "--rounds", "--time-limit-s"]),
        (["bench", "report", "--help"], ["--into", "--pictures", "--picture-format {svg,png}"]),
        (["bench", "train", "--help"], ["MODEL", "--batch-size", "--amp", "--compile", "--norm"]),
        (["bench", "infer", "--help"], ["--dtype", "--sequential"]),
        (["predict", "--help"], ["IMAGE", "--weights", "--topk"]),
        (["convert", "--help"], ["IN", "OUT", "--format {tresnet,timm}", "--model"]),
    ],
)
def test_help_of_a_command(arguments, words, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(arguments)
    text = capsys.readouterr().out
    assert [word for word in words if word not in text] == []


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


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    def interrupted(self, argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(info.Info, "run", interrupted)
    assert run(["info", "tresnet_t"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_programming_errors_keep_their_traceback(monkeypatch):
    def broken(self, argv):
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(info.Info, "run", broken)
    with pytest.raises(TypeError, match="a mistake of ours"):
        run(["info", "tresnet_t"])


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
    options = {"tresnet.measure", "tresnet.measure.cases"}  # which import nothing themselves
    assert [name for name in loaded if name.startswith(late) and name not in options] == []
    assert own <= {name for name in loaded if name.startswith("tresnet")}


def test_table_aligns_numbers_right_and_words_left():
    table = format_table(["model", "n"], [["tresnet_t", "7"], ["b", "1,000.5"], ["c", "-"]])
    assert table.splitlines() == [
        "model            n",
        "tresnet_t        7",
        "b          1,000.5",
        "c                -",
    ]


def test_table_without_rows():
    assert format_table(["a", "b"], []) == "a  b"


def test_output_that_nobody_reads_is_no_crash(capsys, monkeypatch):
    def gone(_):
        raise BrokenPipeError

    redirected = []
    monkeypatch.setattr("tresnet.cli.list.say", gone)
    monkeypatch.setattr("os.dup2", lambda *ends: redirected.append(ends))
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    assert run(["list"]) == 141
    assert [to for _, to in redirected] == [1]
    assert capsys.readouterr().err == ""
