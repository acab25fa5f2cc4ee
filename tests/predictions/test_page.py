"""Test the page of `tresnet demo` in a real browser; .ci/run makes an environment for gradio."""

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
from sklearn.datasets import load_digits

import tresnet
from tresnet.cli.main import main as run

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert run(["demo", "tresnet_t.digits"]) == 2
    assert "pip install 'tresnet[demo]'" in capsys.readouterr().err


def test_an_address_that_is_taken_names_the_options(monkeypatch, capsys):
    class Page:
        def launch(self, **options):
            raise OSError("Cannot find empty port in range: 7860-7860. You can specify ...")

    monkeypatch.setattr("tresnet.predictions.page.make_page", lambda *arguments: Page())
    assert run(["demo", "tresnet_t.digits"]) == 2
    assert "cannot serve at 127.0.0.1:7860: choose a free --port" in capsys.readouterr().err


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def address(tmp_path):
    """Serve the page with weights for digits, and yield its address."""
    pytest.importorskip("gradio", reason="pip install -e '.[demo]'")
    pytest.importorskip("torchcam")
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
        yield f"http://127.0.0.1:{port}"
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=30) in (0, 130)


@pytest.mark.slow
def test_the_page_reads_images_as_predict_does_and_says_why_it_cannot(tmp_path, address):
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    client = Client(address, verbose=False)
    digit = load_digits().images[3]
    turned = Image.Exif()
    turned[274] = 6  # EXIF orientation
    Image.fromarray((digit * 4000).astype("uint16")).save(tmp_path / "of 16 bits.png")
    Image.fromarray((digit * 15).astype("uint8")).save(tmp_path / "turned.jpg", exif=turned)
    for name in ("of 16 bits.png", "turned.jpg"):
        (expected,) = tresnet.predict(tmp_path / name, weights="tresnet_t.digits")
        label, _ = client.predict(handle_file(tmp_path / name), api_name="/answer")
        assert label["label"] == expected.classes[0]
        assert label["confidences"][0]["confidence"] == pytest.approx(expected.probabilities[0])
    Image.fromarray(digit.astype("float32")).save(tmp_path / "of 32 bits.tif")
    (tmp_path / "text.png").write_text("text")
    for name, reason in {"of 32 bits.tif": "no defined range", "text.png": "identify"}.items():
        with pytest.raises(AppError, match=reason):
            client.predict(handle_file(tmp_path / name), api_name="/answer")


@pytest.mark.slow
def test_an_image_dropped_on_the_page_is_predicted_and_mapped(tmp_path, address):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}")
    picture = tmp_path / "digit.png"
    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(picture)
    (expected,) = tresnet.predict(picture, weights="tresnet_t.digits")
    with playwright.sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=browser).new_page()
        window.goto(address)
        window.locator("input[type=file]").first.set_input_files(str(picture))
        label = window.locator("[data-testid=label-output-value]")
        label.wait_for()
        assert label.inner_text() == expected.classes[0]
        confidence = window.locator("[data-testid$='-confidence-set']").first.inner_text()
        assert confidence.split() == ["0", f"{100 * expected.probabilities[0]:.0f}%"]
        # only the Grad-CAM picture has 32 pixels, the model's input size
        window.wait_for_function("[...document.images].some(image => image.naturalWidth == 32)")
