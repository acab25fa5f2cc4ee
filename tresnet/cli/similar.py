"""`tresnet similar`: rank images by their similarity to an image."""

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tresnet.cli.output import BAD_IMAGE_EXIT_CODE, format_table, one_line, progress, say
from tresnet.errors import TResNetError
from tresnet.settings import Build, DeviceName, InferenceCompute, MaxImagePixels
from tresnet.settings.fields import Count, Settings, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similar(Settings):
    """Rank images by their similarity to an image: the cosine of the model's pooled features."""

    device: DeviceName = "auto"
    max_image_pixels: MaxImagePixels = None
    image: Annotated[Positional[str], arg(metavar="IMAGE")]
    """Image file to compare with."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="FOLDER [FOLDER ...]")]
    """Folders, image files or quoted patterns to rank. Unreadable images are reported as errors."""
    weights: str
    """Weights: a tag of `tresnet list`, a file, a folder in timm's layout or hf-hub:USER/NAME."""
    top_k: Count = 10
    """Number of images to name, the most similar first."""
    format: Literal["table", "csv"] = "table"
    """Output. table: aligned columns. csv: a row for each image."""
    sheet: Path | None = None
    """New PNG file for thumbnails of the image and of those that are named."""
    batch_size: Size = 32
    """Number of images in a batch."""
    build: Build = dataclasses.field(default_factory=Build)
    compute: InferenceCompute = dataclasses.field(default_factory=InferenceCompute)

    def run(self, argv: list[str]) -> int:
        from tresnet.predictions import similar

        bad: list[TResNetError] = []
        ranking = similar(
            self.image,
            self.images,
            weights=self.weights,
            batch_size=self.batch_size,
            device=self.device,
            build=self.build,
            compute=self.compute,
            max_image_pixels=self.max_image_pixels,
            say=progress,
            bad=lambda error: (bad.append(error), progress(f"error: {one_line(str(error))}")),
            top_k=self.top_k,
            sheet=self.sheet,
        )
        header = "rank", "similarity", "image"
        rows = [(str(n), f"{one.similarity:.6f}", one.image) for n, one in enumerate(ranking, 1)]
        if self.format == "csv":
            csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])
        else:
            say(format_table(header, rows))
        return BAD_IMAGE_EXIT_CODE if bad else 0
