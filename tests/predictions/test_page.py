"""The page of `tresnet demo`, in a real browser; .ci/run has an environment for it alone."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import tresnet
from tresnet.cli.main import main as run

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert run(["demo", "tresnet_t.digits"]) == 2
    assert "pip install 'tresnet[demo]'" in capsys.readouterr().err


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_an_image_dropped_on_the_page_is_predicted_and_mapped(tmp_path):
    pytest.importorskip("gradio", reason="pip install -e '.[demo]'")
    pytest.importorskip("torchcam")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}")
    from sklearn.datasets import load_digits

    picture = tmp_path / "digit.png"
    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(picture)
    (expected,) = tresnet.predict(picture, weights="tresnet_t.digits")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tresnet.cli.main", "demo", "tresnet_t.digits"]
    served = subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _listens(port):
            assert served.poll() is None
            time.sleep(0.2)
        with playwright.sync_playwright() as driver:
            window = driver.chromium.launch(executable_path=browser).new_page()
            window.goto(f"http://127.0.0.1:{port}")
            window.locator("input[type=file]").first.set_input_files(str(picture))
            label = window.locator("[data-testid=label-output-value]")
            label.wait_for()
            assert label.inner_text() == expected.classes[0]
            confidence = window.locator("[data-testid$='-confidence-set']").first.inner_text()
            assert confidence.split() == ["0", f"{100 * expected.probabilities[0]:.0f}%"]
            # the map is as large as what the model saw, the picture is not
            window.wait_for_function("[...document.images].some(one => one.naturalWidth == 32)")
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=30) in (0, 130)
