#!/usr/bin/env python3
"""Print the page of all commands: `python docs/commands.py > docs/reference/commands.md`."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"NO_COLOR": "1", "COLUMNS": "100"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tresnet.cli.main import main
from tresnet.cli.train_eval import eval_command, train_command

PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "train.py": train_command,
    "eval.py": eval_command,
    "tresnet": main,
}
COMMANDS = (
    *("train.py", "eval.py", "tresnet list", "tresnet info", "tresnet predict", "tresnet similar"),
    *("tresnet demo", "tresnet push", "tresnet convert", "tresnet export", "tresnet shard"),
    *("tresnet split", "tresnet bench train", "tresnet bench infer", "tresnet bench max-batch"),
    *("tresnet memory predict", "tresnet memory max-batch", "tresnet memory measure"),
)

print("# Commands\n\nThe options of every command, as `--help` prints them.")
for command in COMMANDS:
    program, *words = command.split()
    print(f"\n## {command}\n\n```text")
    with contextlib.suppress(SystemExit):
        PROGRAMS[program]([*words, "--help"])
    print("```")
