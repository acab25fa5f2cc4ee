"""Test that benchmarks report bad input with exit code 2 and without a traceback."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.forks import run_forked

FOLDER = Path(__file__).parents[2] / "benchmarks"


def start(script, *arguments):
    sys.argv = [script, *arguments]
    runpy.run_path(str(FOLDER / script), run_name="__main__")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ops.py abn --batch-size 1", "--batch-size: expected at least 2, got 1"),
        ("loaders.py --rounds 0", "--rounds: expected at least 1, got 0"),
        ("profile_step.py tresnet_t --device cuda:99", "expected a device of this machine"),
        ("host_time.py --rounds 0", "--rounds: expected at least 1, got 0"),
        ("memory_accuracy.py --device cuda:99", "expected a device of this machine"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(line, words, tmp_path):
    ended = run_forked(start, *line.split(), folder=tmp_path)
    last = ended.stderr.splitlines()[-1]  # torch's own warnings may precede it
    assert (ended.returncode, last[:7]) == (2, "error: ")
    assert words in last
    assert "Traceback" not in ended.stderr
