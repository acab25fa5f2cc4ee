"""Builds the pages: `sphinx-build -W -b html docs build/docs`."""

import contextlib
import importlib
import importlib.metadata
import io
import os
from pathlib import Path

os.environ |= {"NO_COLOR": "1", "COLUMNS": "100"}

project = "tresnet"
release = importlib.metadata.version("tresnet")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "tresnet"
default_role = "code"
autodoc_typehints = "signature"
suppress_warnings = ["myst.xref_missing"]  # links from pages to files of the repository
myst_heading_anchors = 3

HERE = Path(__file__).parent
PROGRAMS = {
    "train.py": ("tresnet.cli.train", "train_command"),
    "eval.py": ("tresnet.cli.train", "eval_command"),
    "tresnet": ("tresnet.cli.main", "main"),
}
COMMANDS = [
    ["train.py"],
    ["eval.py"],
    ["tresnet", "list"],
    ["tresnet", "info"],
    ["tresnet", "predict"],
    ["tresnet", "demo"],
    ["tresnet", "push"],
    ["tresnet", "convert"],
    ["tresnet", "export"],
    ["tresnet", "shard"],
    ["tresnet", "bench", "train"],
    ["tresnet", "bench", "infer"],
    ["tresnet", "bench", "max-batch"],
    ["tresnet", "memory", "predict"],
    ["tresnet", "memory", "max-batch"],
    ["tresnet", "memory", "measure"],
]


def write_options() -> None:
    """The help of each command as it prints it, for `reference/commands.md` to include."""
    parts = []
    for words in COMMANDS:
        module, function = PROGRAMS[words[0]]
        main = getattr(importlib.import_module(module), function)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*words[1:], "--help"])
        parts.append(f"## {' '.join(words)}\n\n```text\n{text.getvalue()}```\n")
    (HERE / "reference" / "options.txt").write_text("\n".join(parts), encoding="utf-8")


write_options()
