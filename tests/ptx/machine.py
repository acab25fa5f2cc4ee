"""Programs of a kernel, run warp by warp on a CPU.

A `Machine` runs many Triton programs of a launch at once. A `Wave` is the warps with one number, of
all programs: its registers are NumPy arrays with a value for each of its lanes.

    wave 0 | warp 0 of program 0 | warp 0 of program 1 | ...    32 lanes each
    wave 1 | warp 1 of program 0 | warp 1 of program 1 | ...

A wave runs until all its lanes wait at a barrier or have ended, then the next wave runs. So warps
run as far apart as barriers let them, in one order and in the reverse one. When all wait, the next
epoch begins. Lanes that have branched apart run from the lowest place on, until they meet.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ptx.memory import APART, EPOCHS, POISON, WARPS, Region
from tests.ptx.parse import FaultError, Program

WARP = 32
UINTS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MOST_INSTRUCTIONS = 1_000_000  # of a wave in an epoch, in place of an endless loop


class Machine:
    """Programs `places` (K, 3), coordinates in `grid`, of a launch with tensors `regions`."""

    def __init__(
        self,
        program: Program,
        regions: list[Region],
        parameters: Sequence[int],
        shared_bytes: int,
        places: np.ndarray,
        grid: Sequence[int],
    ) -> None:
        self.program, self.parameters = program, parameters
        self.shared_bytes = -(-shared_bytes // 16) * 16
        stored = [one.words[-1] for one in program.code if one.words[:2] == ("st", "shared")]
        grain = 1 if "b8" in stored else 2 if "b16" in stored else 4
        shared = np.full(len(places) * self.shared_bytes, POISON, np.uint8)
        self.regions = [Region("shared memory", shared, grain), *regions]
        self.epoch = 0
        self.waves = [Wave(self, n, places, grid) for n in range(program.threads // WARP)]

    def run(self, reverse: bool) -> None:
        """Run all programs to their end, in an order of warps, which must not matter."""
        waves = self.waves[::-1] if reverse else self.waves
        np.seterr(all="ignore")
        while any(wave.live.any() for wave in waves):
            for wave in waves:
                wave.run()
            waiting = np.array([wave.waiting.reshape(-1, WARP).any(1) for wave in waves]).any(0)
            for wave in waves:
                absent = wave.live & ~wave.waiting
                if (absent.reshape(-1, WARP).any(1) & waiting).any():
                    raise FaultError("a barrier that a part of a program does not reach")
                wave.waiting[:] = False
            self.epoch += 1


class Wave:
    """Warps with one number, of all programs of a machine."""

    def __init__(
        self, machine: Machine, number: int, places: np.ndarray, grid: Sequence[int]
    ) -> None:
        lanes = np.arange(len(places) * WARP)
        self.machine, self.number = machine, number
        self.program = lanes // WARP  # its place in the machine
        self.id = (places @ [1, grid[0], grid[0] * grid[1]])[self.program]  # in the launch
        self.live, self.waiting = np.ones(len(lanes), bool), np.zeros(len(lanes), bool)
        self.mask = self.live  # lanes that execute the current instruction
        self.pc = np.zeros(len(lanes), np.int64)
        self.registers: dict[str, np.ndarray] = {}
        self.numbers: dict[tuple[str, int], np.ndarray] = {}  # constants, by their text and bits
        self.pending: list[Any] = []  # copies by cp.async that may not have arrived
        self.committed = np.zeros(len(lanes), np.int64)  # groups of such copies
        self.special = {"%tid.x": number * WARP + lanes % WARP, "%laneid": lanes % WARP}
        for axis, own, size in zip("xyz", places.T, grid, strict=True):
            self.special[f"%ctaid.{axis}"] = own[self.program]
            self.special[f"%nctaid.{axis}"] = np.full(len(lanes), size)

    def run(self) -> None:
        """Run until all lanes wait or have ended."""
        from tests.ptx.instructions import execute

        program, lanes, together, here = self.machine.program, None, False, 0
        for _ in range(MOST_INSTRUCTIONS):
            if lanes is None:
                able = self.live & ~self.waiting
                if not able.any():
                    return
                here = int(self.pc[able].min())
                lanes = able & (self.pc == here)
                together = bool((lanes == able).all())  # until the next branch
            one, here, self.mask = program.code[here], here + 1, lanes
            if one.predicate:
                holds = self.registers[one.predicate]
                self.mask = lanes & (~holds if one.negated else holds)
            flows = one.words[0] in ("bra", "brx", "ret", "bar") and "warp" not in one.words
            if not flows and (not one.predicate or self.mask.any()):
                try:
                    execute(self, one)
                except FaultError as fault:
                    raise FaultError(f"{fault}: {one}") from None
            if together and not flows:
                continue
            self.pc[lanes], lanes = here, None
            match one.words[0]:
                case "bra":
                    self.pc[self.mask] = program.labels[one.operands[0]]
                case "brx":
                    table = np.array([program.labels[n] for n in program.tables[one.operands[1]]])
                    self.pc[self.mask] = table[self.read(one.operands[0], 32)[self.mask]]
                case "ret":
                    self.live &= ~self.mask
                case "bar" if flows:
                    self.waiting |= self.mask
        raise FaultError("a loop without an end")

    def read(self, operand: str, bits: int) -> np.ndarray:
        """Return an operand, a register or a number, as an unsigned integer of each lane."""
        if operand in self.special:
            return self.special[operand].astype(UINTS[bits])
        if not operand.startswith("%"):
            if (operand, bits) not in self.numbers:
                values = np.full(len(self.live), self._number(operand, bits), UINTS[bits])
                self.numbers[operand, bits] = values
            return self.numbers[operand, bits]
        values = self._register(operand)
        if values.itemsize * 8 < bits:
            raise FaultError(f"{operand} has fewer than {bits} bits")
        return values.astype(UINTS[bits], copy=False)  # a wider register's low bits

    def write(self, name: str, values: np.ndarray) -> None:
        """Store unsigned integers or truths in a register, in the lanes that run."""
        if name != "_":
            register = self._register(name)
            np.copyto(register, values.astype(register.dtype, copy=False), where=self.mask)

    def _register(self, name: str) -> np.ndarray:
        if name not in self.registers:  # poison, until it is written
            kind = UINTS[self.machine.program.widths[re.match(r"%([a-z]+)", name)[1]]]
            self.registers[name] = np.full(len(self.live), -1, np.int64).astype(kind)
        return self.registers[name]

    def _number(self, text: str, bits: int) -> int:
        """Return the bits of a number or of an address; hexadecimal floats begin with 0f or 0d."""
        if text in self.machine.program.parameters:  # each takes eight bytes
            return 8 * self.machine.program.parameters.index(text)
        if text.startswith("global_smem"):
            return int(text[len("global_smem") :] or 0)
        return int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0) % 2**bits

    def address(self, operand: str, space: str) -> np.ndarray:
        """Return the addresses of an operand such as [%rd1 + 16], of the lanes that run."""
        base, _, offset = operand.strip("[] ").partition("+")
        values = self.read(base.strip(), 64 if space == "global" else 32)
        return values.astype(np.int64)[self.mask] + int(offset or 0)

    def load(self, space: str, address: np.ndarray, size: int) -> np.ndarray:
        """Return `size` bytes from each address of the lanes that run."""
        data = np.empty((len(address), size), np.uint8)
        for region, lanes, at, who in self.parts(space, address, size):
            data[lanes] = region.read(at, size, who)
        return data

    def store(self, space: str, address: np.ndarray, data: np.ndarray) -> None:
        """Store a row of bytes at each address of the lanes that run."""
        for region, lanes, at, who in self.parts(space, address, data.shape[1]):
            region.write(at, data[lanes], who)

    def parts(self, space: str, address: np.ndarray, size: int) -> Any:
        """Yield each region with the lanes that access it, the offsets, and the codes of who."""
        programs, limit = self.id[self.mask], self.machine.shared_bytes
        if space == "shared":
            programs = self.program[self.mask]
            if ((address < 0) | (address + size > limit)).any():
                raise FaultError(f"shared memory: an access outside of its {limit} bytes")
            address = programs * limit + address
        elif (address < APART).any():
            raise FaultError("an access outside of all tensors")
        who = programs * EPOCHS + self.machine.epoch * WARPS + self.number
        numbers, regions = address // APART, self.machine.regions
        for number in np.unique(numbers):
            region, lanes = (
                regions[min(number, len(regions) - 1)],
                np.flatnonzero(numbers == number),
            )
            at = address[lanes] - number * APART - region.begin
            if number >= len(regions) or ((at < 0) | (at + size > len(region.values))).any():
                raise FaultError(f"{region.name}: {size} bytes at {at.max()} are outside")
            if (address[lanes] % size).any():
                raise FaultError(f"{region.name}: an access of {size} bytes is not aligned")
            yield region, lanes, at, who[lanes]

    def whole_warps(self) -> np.ndarray:
        """Return the warps that run, of which every lane must take part."""
        some = self.mask.reshape(-1, WARP)
        if (some.any(1) & ~some.all(1)).any():
            raise FaultError("an instruction of a whole warp, in which a lane takes no part")
        return np.flatnonzero(some.any(1))
