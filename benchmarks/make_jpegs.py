#!/usr/bin/env python3
"""Make a folder of JPEG files as large as ImageNet's: `python benchmarks/make_jpegs.py FOLDER`.

The files have 500 x 375 pixels and about 93 kB: noise of three scales and of single pixels. Only
`--distinct` of them differ, and the others are hard links, so 25,600 take seconds.
"""

import argparse
import os
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (500, 375)
# Width in pixels of noise that is enlarged to `SIZE`, and its weight. With pixel noise and quality
# 90, these give files of about 93 kB.
SCALES = ((8, 90), (32, 50), (128, 25))
PIXEL_NOISE = 15


def write_jpeg(path: Path, seed: int) -> None:
    """Write the JPEG file of a seed."""
    random = np.random.default_rng(seed)
    pixels = random.normal(0, PIXEL_NOISE, (SIZE[1], SIZE[0], 3))
    for width, weight in SCALES:
        noise = (random.random((width * 3 // 4, width, 3)) * 255).astype(np.uint8)
        scaled = Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC)
        pixels += weight / sum(weight for _, weight in SCALES) * np.asarray(scaled)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def make(root: Path, distinct: int, counts: dict[str, int], classes: int) -> None:
    """Write `root`/SPLIT/CLASS/N.jpg with `counts` images per split."""
    base = root / "distinct"
    base.mkdir(parents=True)
    paths = [base / f"{number}.jpg" for number in range(distinct)]
    with Pool() as pool:
        pool.starmap(write_jpeg, zip(paths, range(distinct), strict=True), chunksize=8)
    for split, count in counts.items():
        for number in range(count):
            folder = root / split / f"c{number % classes:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            os.link(paths[number % distinct], folder / f"{number}.jpg")


def main() -> None:
    """Make the folder that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--distinct", type=int, default=1600)
    parser.add_argument("--train", type=int, default=12800)
    parser.add_argument("--val", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=100)
    options = parser.parse_args()
    counts = {"train": options.train, "val": options.val}
    make(options.folder, options.distinct, counts, options.classes)


if __name__ == "__main__":
    main()
