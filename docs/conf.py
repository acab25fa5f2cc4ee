"""Builds the pages: `sphinx-build -W -b html docs build/docs`."""

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

project = "tresnet"
release = importlib.metadata.version("tresnet")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "tresnet"
html_static_path, html_css_files = ["_static"], ["site.css"]
default_role = "code"
autodoc_typehints = "signature"
suppress_warnings = ["myst.xref_missing"]  # links from pages to files of the repository
myst_heading_anchors = 3


def setup(app: Any) -> None:
    """Copy the pictures that pages show by HTML, which GitHub renders too."""
    folder = Path(__file__).with_name("pictures")
    shutil.copytree(folder, Path(app.outdir, "pictures"), dirs_exist_ok=True)
