"""Writes small images of four channels, in which a class is a channel that is brighter."""

from pathlib import Path

import numpy as np

CLASSES = ("field", "lake", "wood")


def make(label: int, seed: int, dtype: str = "uint16", channels: int = 4) -> np.ndarray:
    """Return noise (15, 12 + label, channels) whose channels differ much in mean and deviation."""
    draws = np.random.default_rng(seed)
    values = draws.normal(0, 1, (15, 12 + label, channels))
    values[..., label] += 3
    scale = 1 if dtype == "uint8" else 100
    pixels = 40 * scale + scale * values * np.arange(1, channels + 1)
    return pixels.astype(dtype)


def write(root: Path, dtype: str = "uint16", channels: int = 4, **counts: int) -> None:
    """Write so many images for each split by name, in turn for each class, as TIFF and .npy."""
    import tifffile

    for split, count in counts.items():
        for index in range(count):
            folder = root / split / CLASSES[index % 3]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = make(index % 3, 1000 * count + index, dtype, channels)
            if index % 2:
                np.save(folder / f"{index:03}.npy", pixels)
            else:
                planar = {"planarconfig": "separate"} if index % 4 else {"planarconfig": "contig"}
                data = pixels.transpose(2, 0, 1) if index % 4 else pixels
                tifffile.imwrite(
                    folder / f"{index:03}.tif", data, photometric="minisblack", **planar
                )
