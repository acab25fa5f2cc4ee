"""Images are read on threads, in a child process because what fails there may end the process."""

import subprocess
import sys

import numpy as np
from PIL import Image

READ = """
import sys
from tresnet.data.transforms import transform_of
from tresnet.predictions.reader import ImageModel, outputs, raise_error
cfg = {"crop_pct": 0.875, "interpolation": "bilinear", "crop_mode": "center"}
model = ImageModel(lambda batch: batch.float().mean((2, 3)), transform_of(cfg, 64))
images = [sys.argv[1]] * 3
print(sum(len(names) for names, _, _ in outputs(images, model, 8, raise_error)))
print("nvidia.nvimgcodec" in sys.modules)  # its decoder is no thread's own
"""


def test_threads_decode_jpeg_files_by_pillow_alone(tmp_path):
    noise = np.random.default_rng(0)
    for index in range(60):
        pixels = noise.integers(0, 256, (24, 32, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(tmp_path / f"{index}.jpg")
    command = [sys.executable, "-c", READ, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.split(), found.stderr) == (0, ["180", "False"], "")
