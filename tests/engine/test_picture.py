import sys
import xml.etree.ElementTree as ET

import pytest

from tresnet.engine import train as training
from tresnet.engine.train import train
from tresnet.errors import WriteError


@pytest.fixture
def undrawn():
    """Here runs are drawn."""


def test_a_run_draws_itself_at_its_end(tiny, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    config = tiny(epochs=1, name="to $2^$", recipe="\x1b")
    picture = train(config).run_dir / "run.svg"
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert "to $2^$: tresnet_t, ?" in picture.read_text()

    def full(*_):
        raise WriteError("no space")

    monkeypatch.setattr(training, "draw", full)
    assert train(tiny(epochs=1)).metrics is not None
    assert "warning: no picture of the run: no space" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not (train(tiny(epochs=1, name="undrawn")).run_dir / "run.svg").exists()
