"""Memory of kernels: addresses are checked, and so is who may read what somebody else writes.

    shared memory of all programs | nothing | tensor x | nothing | tensor out | ...

Each is a `Region`. Barriers divide the life of a program into epochs. What one warp writes, another
warp of the program may read from the next epoch on; before, it reads poison, which a test sees in
what it compares. Warps of a program must not write different values to one place in one epoch, nor
to what another of them has read in it, nor programs to what another program reads or writes. No
rule depends on the order in which warps run, so one order shows what any would. Several warps may
load a value of a tensor of which one stores the result, because Triton masks the other stores.
"""

import numpy as np

from tests.ptx.parse import FaultError

POISON = 0xFF  # bytes of NaN
APART = 2**40  # between the addresses of two regions, so that an address is in one or in none
EPOCHS = 2**32  # the epoch of a program is number * EPOCHS + number of barriers
NOBODY, SEVERAL = -1, -2  # in place of a program's epoch
SHARED = "shared memory"


class Accesses:
    """Who has accessed each cell of a region: the last program's epoch, and its warps as bits."""

    def __init__(self, cells: int) -> None:
        self.epochs, self.warps = np.full(cells, NOBODY), np.zeros(cells, np.int64)

    def before(self, cells: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether another program has accessed cells, and the warps that have in epochs."""
        last = self.epochs[cells]
        apart = (last != NOBODY) & (last // EPOCHS != epochs // EPOCHS)
        return apart, np.where(last == epochs, self.warps[cells], 0)

    def add(self, cells: np.ndarray, epochs: np.ndarray, warps: np.ndarray) -> None:
        """Note accesses."""
        apart, active = self.before(cells, epochs)
        self.warps[cells[active == 0]] = 0
        self.epochs[cells] = epochs
        np.bitwise_or.at(self.warps, cells, warps)
        apart |= self.before(cells, epochs)[0]  # within this instruction
        self.epochs[cells[apart]] = SEVERAL


class Region:
    """Bytes that kernels may access, in cells of `grain` bytes, with their writers and readers."""

    def __init__(self, name: str, values: np.ndarray, grain: int, begin: int = 0) -> None:
        self.name, self.values, self.grain, self.begin = name, values, grain, begin
        self.writers, self.readers = (Accesses(-(-len(values) // grain)) for _ in range(2))

    def read(self, at: np.ndarray, size: int, who: np.ndarray) -> np.ndarray:
        """Return `size` bytes from each offset; note who reads: epochs and warps (2, lanes)."""
        data = self.values[at[:, None] + np.arange(size)]
        cells, (epochs, warps) = self._cells(at, size), who[..., None]
        apart, writers = self.writers.before(cells, epochs)
        self._check(apart, "reads", "writes")
        unseen = (writers != 0) & (writers & warps == 0)
        data[np.repeat(unseen, size // cells.shape[1], 1)] = POISON
        self.readers.add(cells, epochs, warps)
        return data

    def write(self, at: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Write a row of bytes at each offset; note who writes."""
        places = at[:, None] + np.arange(data.shape[1])
        cells, (epochs, warps) = self._cells(at, data.shape[1]), who[..., None]
        differs = (self.values[places] != data).any(1)[:, None]
        for accesses, other in ((self.readers, "reads"), (self.writers, "writes")):
            apart, active = accesses.before(cells, epochs)
            may = other == "reads" and self.name != SHARED  # store what it loaded too
            race = (active & ~warps != 0) & ((active & warps == 0) | (not may))
            self._check(apart | differs & race, "writes", other)
        self.writers.add(cells, epochs, warps)
        self._check(self.writers.epochs[cells] == SEVERAL, "writes", "writes")
        self.values[places] = data
        if not np.array_equal(self.values[places], data):
            raise FaultError(f"{self.name}: one instruction writes different values to a place")

    def _cells(self, at: np.ndarray, size: int) -> np.ndarray:
        return (at[:, None] + np.arange(0, size, min(size, self.grain))) // self.grain

    def _check(self, wrong: np.ndarray, does: str, other: str) -> None:
        if wrong.any():
            raise FaultError(f"race in {self.name}: a warp {does} what another {other}")
