"""Scores and labels of all images of an evaluation, read by class, in little memory."""

import shutil
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from torch import Tensor

from tresnet import writing
from tresnet.errors import WriteError

PAIR_BYTES = 5  # of a score, float32, and a label, bool
_IN_MEMORY_BYTES = 2**30
_CHUNK_BYTES = 2**26  # long enough for the time of a read, which takes a few classes of a chunk


class ScoreStore:
    """Store of scores and labels, in memory or, from 1 GiB on, in a temporary file.

        chunk 0: scores of class 0 | of class 1 | ... labels of class 0 | of class 1 | ...
        chunk 1: ...

    Args:
        images: Number of images to come, at most.
        classes: Number of classes.

    Raises:
        WriteError: The file would not fit on its disk.
    """

    def __init__(self, images: int, classes: int) -> None:
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._chunks: list[int] = []  # numbers of images
        self.classes, self._file = classes, None
        size = images * classes * PAIR_BYTES
        if size < _IN_MEMORY_BYTES:
            return
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if free < size:
            raise WriteError(
                f"expected {size / 2**30:.1f} GiB free in {folder} for the scores of {images}"
                f" images and {classes} classes, got {free / 2**30:.1f} GiB: set TMPDIR to another"
                " directory"
            )
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  `close` does

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch of scores, float32, and labels, bool, both (N, classes) on the CPU."""
        self._rows.append((scores, labels))
        images = sum(len(rows) for rows, _ in self._rows)
        if self._file is not None and images * self.classes * PAIR_BYTES >= _CHUNK_BYTES:
            self._write(self._file)
            self._chunks.append(images)
            self._rows.clear()

    def _write(self, file: IO[bytes]) -> None:
        with writing.as_write_error(tempfile.gettempdir()):
            for values in map(torch.cat, zip(*self._rows, strict=True)):
                file.write(values.T.contiguous().numpy().data)
            file.flush()

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the scores and labels (N, end - begin) of the classes from `begin` to `end`."""
        parts = [(scores[:, begin:end], labels[:, begin:end]) for scores, labels in self._rows]
        if self._file is not None:
            parts += self._chunks_of(self._file, begin, end)
        scores, labels = (torch.cat(values) for values in zip(*parts, strict=True))
        return scores, labels

    def _chunks_of(self, file: IO[bytes], begin: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for images in self._chunks:
            pair = []
            for dtype in (np.float32, np.bool_):
                # mapped for this read only, so that its pages do not stay in memory
                whole = np.memmap(file, dtype, "r", at, (self.classes, images))
                pair.append(torch.from_numpy(whole[begin:end].copy()).T)
                at += whole.nbytes
            yield pair[0], pair[1]

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
