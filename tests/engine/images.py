"""Writes small images whose class can be seen."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("blue", "green", "red")


def write_images(
    root: Path, split: str, count: int, classes: tuple[str, ...] = CLASSES, suffix: str = ".png"
) -> None:
    """Write `count` noisy 12 x 12 images, in turn for each class."""
    noise = np.random.default_rng(count)
    for index in range(count):
        label = index % len(classes)
        pixels = noise.integers(0, 160, (12, 12, 3))
        pixels[..., 2 - label % 3] += 80
        folder = root / split / classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:03d}{suffix}")
