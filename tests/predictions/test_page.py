"""The page of `tresnet demo`, in a real browser. CI has no gradio: it wants an older pillow."""

import shutil

import pytest
from PIL import Image

import tresnet
from tresnet.errors import MissingDependencyError
from tresnet.predictions import Predictor

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def test_without_gradio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    from tresnet.predictions.page import make_page

    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[page\]'"):
        make_page(Predictor("tresnet_t_digits"), "digits")


@pytest.mark.filterwarnings("ignore")  # of gradio about its own parts
def test_an_image_dropped_on_the_page_is_predicted_and_mapped(tmp_path):
    pytest.importorskip("gradio", reason="pip install -e '.[page]'")
    pytest.importorskip("torchcam")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}")
    from sklearn.datasets import load_digits

    from tresnet.predictions.page import make_page

    picture = tmp_path / "digit.png"
    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(picture)
    (expected,) = tresnet.predict(picture, weights="tresnet_t_digits")
    page = make_page(Predictor("tresnet_t_digits", top_k=3, maps=True), "digits")
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True)
    try:
        with playwright.sync_playwright() as driver:
            window = driver.chromium.launch(executable_path=browser).new_page()
            window.goto(address)
            window.locator("input[type=file]").first.set_input_files(str(picture))
            label = window.locator("[data-testid=label-output-value]")
            label.wait_for(timeout=20_000)
            assert label.inner_text() == expected.classes[0]
            confidence = window.locator("[data-testid$='-confidence-set']").first.inner_text()
            assert confidence.split() == ["0", f"{100 * expected.probabilities[0]:.0f}%"]
            mapped = window.locator("img[src*='/file=']").nth(1)  # after the picture itself
            mapped.wait_for(timeout=20_000)
            window.wait_for_function(
                "[...document.images].some(one => one.src.includes('/file=') && one.width >= 32"
                " && one.naturalWidth == 32)"
            )
    finally:
        page.close()
