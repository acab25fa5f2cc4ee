"""Builds the pages: `sphinx-build -W -b html docs build/docs`."""

import importlib.metadata

project = "tresnet"
release = importlib.metadata.version("tresnet")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "tresnet"
default_role = "code"
autodoc_typehints = "signature"
suppress_warnings = ["myst.xref_missing"]  # links from pages to files of the repository
myst_heading_anchors = 3
