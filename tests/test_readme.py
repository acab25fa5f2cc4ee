"""What README.md says: its Python runs, its command lines parse, its figures are the frozen ones."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tyro

from tresnet.checkpoints.published import entries
from tresnet.cli.commands import parse
from tresnet.engine.command import parse_train
from tresnet.engine.evaluate_weights import EvalConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
GOLDEN = json.loads((ROOT / "tests" / "golden" / "zoo.json").read_text())
DOWNLOADS = "<!-- needs a download -->\n"


def blocks(language: str) -> list[str]:
    """Code blocks of a language, less those marked as needing a download."""
    found = re.findall(rf"(?m)(^.*\n)```{language}\n((?:(?!```).*\n)*)```", README)
    return [code for before, code in found if before != DOWNLOADS]


def commands(program: str) -> list[list[str]]:
    """Arguments of each command line with `program` in the bash blocks, prompts and && aside."""
    lines = "\n".join(blocks("bash")).replace("&&", "\n").splitlines()
    words = [shlex.split(line) for line in lines]
    return [line[line.index(program) + 1 :] for line in words if program in line]


def test_python_blocks_run(tmp_path: Path):
    """In a process of its own: the plugin changes what timm builds."""
    code = blocks("python")
    assert len(code) == 7
    result = subprocess.run(
        # PyTorch 2.11 warns of its own use of TorchScript
        [sys.executable, "-W", "error", "-W", "ignore:`torch.jit", "-c", "\n".join(code)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "mine.pth").is_file()


def test_train_commands_parse():
    lines = commands("train.py")
    assert len(lines) == 5
    for line in lines:
        if "--resume" not in line:
            assert parse_train(line).config.data.data, line


def test_eval_commands_parse():
    lines = commands("eval.py")
    assert len(lines) == 3
    assert all(tyro.cli(EvalConfig, args=line).weights for line in lines)


def test_tresnet_commands_parse():
    lines = commands("tresnet")
    assert len(lines) == 12
    for line in lines:
        assert dataclasses.is_dataclass(parse(line)), line


def rows(*header: str) -> list[list[str]]:
    """Cells of the table with these first columns."""
    start = README.index(f"| {' | '.join(header)} |")
    lines = README[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_model_table_holds_the_golden_figures():
    table = {row[0]: row[1:4] for row in rows("model", "parameters")}
    expected = {
        name: [f"{golden['parameters']:,}", golden["macs"] / 1e9, str(golden["pixels"])]
        for name, golden in GOLDEN.items()
    }
    assert table.keys() == expected.keys()
    for name, (parameters, gmacs, pixels) in table.items():
        assert [parameters, pixels] == [expected[name][0], expected[name][2]], name
        digits = len(gmacs.partition(".")[2])
        assert gmacs == f"{expected[name][1]:.{digits}f}", name


def test_accuracy_table_is_the_manifests():
    quoted = {row[0]: [float(cell) for cell in row[1:]] for row in rows("weights", "input")}
    manifest = {
        tag: [entry.input_size[-1], entry.top1, entry.top5]
        for tag, entry in entries().items()
        if entry.accuracy_source and "results-imagenet.csv" in entry.accuracy_source
    }
    assert quoted == manifest
