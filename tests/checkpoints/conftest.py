import time
from dataclasses import replace

import pytest

from tests.checkpoints.hub import running_hub
from tresnet.checkpoints import download, published, weights
from tresnet.checkpoints.published import find

PUBLISHED = find("tresnet_m.miil_in1k")


def entry(**changes):
    return replace(PUBLISHED, **changes)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An own table and weights folder: (folder, function that adds a row)."""
    folder = tmp_path / "weights"
    folder.mkdir()
    rows = {}
    for module in (published, download, weights):
        monkeypatch.setattr(module, "weights_dir", lambda: folder)
    monkeypatch.setattr(published, "entries", lambda: rows)

    def add(made):
        rows[made.tag] = made
        return made

    return folder, add


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, whose cache is empty."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    with running_hub(monkeypatch, str(tmp_path / "cache")) as running:
        yield running
