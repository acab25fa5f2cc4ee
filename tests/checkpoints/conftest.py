from dataclasses import replace

import pytest
import torch

from tresnet.checkpoints import download, published, weights
from tresnet.checkpoints.published import find

PUBLISHED = find("tresnet_m.miil_in1k")


def entry(**changes):
    return replace(PUBLISHED, **changes)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An own table, weights folder, and empty caches: (folder, function that adds a row)."""
    folder = tmp_path / "weights"
    folder.mkdir()
    rows = {}
    for module in (published, download, weights):
        monkeypatch.setattr(module, "weights_dir", lambda: folder)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(published, "entries", lambda: rows)

    def add(made):
        rows[made.tag] = made
        return made

    return folder, add
