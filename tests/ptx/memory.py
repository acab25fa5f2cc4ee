"""Memory of kernels: addresses are checked, and so is who may read what somebody else writes.

    shared memory of all programs | nothing | tensor x | nothing | tensor out | ...

Each is a `Region`. Barriers divide the life of a program into epochs. What one warp writes, another
warp of the program may read from the next epoch on; before, it reads poison, which a test sees in
what it compares. (A read before the write is as wrong; it is seen where warps run in the reverse
order.) Warps of a program must not write different values to one place in one epoch, nor programs
to what another program reads or writes.
"""

from collections.abc import Iterable

import numpy as np

from tests.ptx.parse import FaultError

POISON = 0xFF  # bytes of NaN
APART = 2**40  # between the addresses of two regions, so that an address is in one or in none
# A code of who writes: program * EPOCHS + epoch * WARPS + warp.
WARPS, EPOCHS = 64, 2**32
NOBODY, SEVERAL = -1, -2


class Region:
    """Bytes that kernels may access, in cells of `grain` bytes, with their writers and readers."""

    def __init__(self, name: str, values: np.ndarray, grain: int, begin: int = 0) -> None:
        self.name, self.values, self.grain, self.begin = name, values, grain, begin
        self.forget()

    def forget(self) -> None:
        """Forget all accesses."""
        cells = -(-len(self.values) // self.grain)
        self.writers = np.full(cells, NOBODY, np.int64)  # codes
        self.readers = np.full(cells, NOBODY, np.int64)  # programs

    def read(self, at: np.ndarray, size: int, who: np.ndarray) -> np.ndarray:
        """Return `size` bytes from each offset; note who reads."""
        data, programs = self.values[at[:, None] + np.arange(size)], who // EPOCHS
        for cells in self._cells(at, size):
            writers, before = self.writers[cells], self.readers[cells]
            self._check((writers != NOBODY) & (writers // EPOCHS != programs), "reads", "writes")
            data[(writers != who) & (writers // WARPS == who // WARPS)] = POISON
            mine = (before == NOBODY) | (before == programs)
            self.readers[cells] = np.where(mine, programs, SEVERAL)
            self.readers[cells[self.readers[cells] != programs]] = SEVERAL
        return data

    def write(self, at: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Write a row of bytes at each offset; note who writes."""
        places = at[:, None] + np.arange(data.shape[1])
        differs = (self.values[places] != data).any(1)
        for cells in self._cells(at, data.shape[1]):
            for _ in range(2):  # other programs may write in this very instruction
                writers, readers = self.writers[cells], self.readers[cells]
                apart = writers // EPOCHS != who // EPOCHS
                apart |= differs & (writers // WARPS == who // WARPS) & (writers != who)
                self._check((writers != NOBODY) & apart, "writes", "writes")
                self._check((readers != NOBODY) & (readers != who // EPOCHS), "writes", "reads")
                self.writers[cells] = who
        self.values[places] = data
        if not np.array_equal(self.values[places], data):
            raise FaultError(f"{self.name}: one instruction writes different values to a place")

    def _cells(self, at: np.ndarray, size: int) -> Iterable[np.ndarray]:
        return ((at + k) // self.grain for k in range(0, size, min(size, self.grain)))

    def _check(self, wrong: np.ndarray, does: str, other: str) -> None:
        if wrong.any():
            raise FaultError(f"race in {self.name}: a warp {does} what another {other}")
