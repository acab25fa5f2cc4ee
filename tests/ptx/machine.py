"""Programs of a kernel, run side by side on a CPU.

A `Machine` runs many Triton programs of a launch at once. Registers are NumPy arrays with a value
for each lane, which is a thread of a program:

    program 0, warp 0: 32 lanes | program 0, warp 1 | ... | program 1, warp 0 | ...

All lanes run until they wait at a barrier or have ended; then the next epoch begins. Lanes that
have branched apart run from the lowest place on, until they meet.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ptx.instructions import TABLE, TYPES, UINTS, WARP, Array, bits_of, encode
from tests.ptx.memory import APART, EPOCHS, POISON, SHARED, Region
from tests.ptx.parse import FaultError, Program

MOST_INSTRUCTIONS = 1_000_000  # in an epoch, in place of an endless loop


class Machine:
    """Programs `ids` of a launch, whose arguments are in `regions` and `parameters`."""

    def __init__(
        self, program: Program, regions: list[Region], parameters: list[int], ids: Array, grid: Any
    ) -> None:
        lanes = np.arange(len(ids) * program.threads)
        self.code, self.parameters = program, parameters
        self.shared_bytes = -(-program.shared_bytes // 16) * 16
        stored = [one.words[-1] for one in program.code if one.words[:2] == ("st", "shared")]
        grain = 1 if "b8" in stored else 2 if "b16" in stored else 4
        shared = np.full(len(ids) * self.shared_bytes, POISON, np.uint8)
        self.regions = [Region(SHARED, shared, grain), *regions]
        self.program, thread = lanes // program.threads, lanes % program.threads
        ids = ids[self.program]
        self.who = np.stack([ids * EPOCHS, 1 << thread // WARP])  # epochs and warps as bits
        self.live, self.waiting = np.ones(len(lanes), bool), np.zeros(len(lanes), bool)
        self.mask = self.live  # lanes that execute the current instruction
        self.pc = np.zeros(len(lanes), np.int64)
        self.pending: list[Any] = []  # copies by cp.async that may not have arrived
        self.committed = np.zeros(len(lanes), np.int64)  # groups of such copies
        places = {"%tid.x": thread, "%nctaid.x": np.full(len(lanes), grid[0])}
        for axis, own in zip("xyz", np.unravel_index(ids, grid, order="F"), strict=True):
            places[f"%ctaid.{axis}"] = own
        self.registers = {name: values.astype(np.uint32) for name, values in places.items()}
        self.views: dict[tuple[str, str], Array] = {}  # operands as a type

    def run(self) -> None:
        """Run all programs to their end."""
        with np.errstate(all="ignore"):
            while self.live.any():
                self._run_epoch()
                places = np.where(self.live, self.pc, -1).reshape(-1, self.code.threads)
                if ((places >= 0) & (places != places.max(1)[:, None])).any():
                    raise FaultError("a barrier that a part of a program does not reach")
                self.waiting[:] = False
                self.who[0] += 1

    def _run_epoch(self) -> None:
        lanes, together, here = None, False, 0
        for _ in range(MOST_INSTRUCTIONS):
            if lanes is None:
                able = self.live & ~self.waiting
                if not able.any():
                    return
                here = int(self.pc[able].min())
                lanes = able & (self.pc == here)
                together = bool((lanes == able).all())  # until the next branch
            one, here, self.mask = self.code.code[here], here + 1, lanes
            if one.predicate:
                holds = self.read(one.predicate, "pred")
                self.mask = lanes & (~holds if one.negated else holds)
            flows = one.words[0] in ("bra", "brx", "ret", "bar") and "warp" not in one.words
            if not flows and (not one.predicate or self.mask.any()):
                try:
                    TABLE[one.words[0]](self, one)
                except Exception as error:  # KeyError: of a word that nobody has taught it
                    raise FaultError(f"{error!r} in {one}") from error
            if together and not flows:
                continue
            self.pc[lanes], lanes = here, None
            match one.words[0]:
                case "bra":
                    self.pc[self.mask] = self.code.labels[one.operands[0]]
                case "brx":
                    table = [self.code.labels[name] for name in self.code.tables[one.operands[1]]]
                    self.pc[self.mask] = np.array(table)[
                        self.read(one.operands[0], "u32")[self.mask]
                    ]
                case "ret":
                    self.live &= ~self.mask
                case "bar" if flows:
                    self.waiting |= self.mask
        raise FaultError("a loop without an end")

    def read(self, operand: str, kind: str) -> Array:
        """Return an operand as values of a type; bf16 becomes float32, and f32x2 becomes pairs."""
        values = self.views.get((operand, kind))
        values = self._view(operand, kind) if values is None else values
        return (values.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else values

    def write(self, name: str, values: Array, kind: str) -> None:
        """Store values of a type in a register, in the lanes that run, as wide as the register."""
        if kind in ("bf16", "tf32"):
            values, kind = encode(values, kind), f"b{bits_of(kind)}"
        if name != "_":
            target, where = self._register(name), self.mask
            if target.itemsize * 8 <= bits_of(kind):
                target = self.read(name, kind)
            np.copyto(target, values, "unsafe", where[:, None] if target.ndim == 2 else where)

    def _register(self, name: str) -> Array:
        if name not in self.registers:  # poison, until it is written
            kind = UINTS[self.code.widths[re.match(r"%([a-z]+)", name)[1]]]
            self.registers[name] = np.full(len(self.live), -1, np.int64).astype(kind)
        return self.registers[name]

    def _view(self, operand: str, kind: str) -> Array:
        raw = np.dtype(UINTS[bits_of(kind)])
        if operand.startswith("%"):
            values = self._register(operand)
        else:
            values = np.full(len(self.live), self._number(operand, bits_of(kind)), raw)
        if values.itemsize < raw.itemsize:
            raise FaultError(f"{operand} has fewer bits than {kind}")
        if values.dtype != raw:  # the low bits of a register, as they are now
            return values.astype(raw).view(TYPES[kind])
        values = values.view(TYPES[kind])
        self.views[operand, kind] = values.reshape(-1, 2) if kind == "f32x2" else values
        return self.views[operand, kind]

    def _number(self, text: str, bits: int) -> int:
        """Return the bits of a number or of an address; hexadecimal floats begin with 0f or 0d."""
        if text in self.code.parameters:  # each takes eight bytes
            return 8 * self.code.parameters.index(text)
        if text.startswith("global_smem"):
            return int(text[len("global_smem") :] or 0)
        return int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0) % 2**bits

    def address(self, operand: str, space: str) -> Array:
        """Return the addresses of an operand such as [%rd1 + 16], of the lanes that run."""
        base, _, offset = operand.strip("[] ").partition("+")
        values = self.read(base.strip(), "u64" if space == "global" else "u32")
        return values[self.mask].astype(np.int64) + int(offset or 0)

    def load(self, space: str, address: Array, size: int, lanes: Array | None = None) -> Array:
        """Return `size` bytes from each address of the lanes, which are those that run."""
        data = np.empty((len(address), size), np.uint8)
        for region, some, at, who in self.parts(space, address, size, lanes):
            data[some] = region.read(at, size, who)
        return data

    def store(self, space: str, address: Array, data: Array, lanes: Array | None = None) -> None:
        """Store a row of bytes at each address of the lanes, which are those that run."""
        for region, some, at, who in self.parts(space, address, data.shape[1], lanes):
            region.write(at, data[some], who)

    def parts(
        self, space: str, address: Array, size: int, lanes: Array | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each region, the indices of its addresses, its offsets, and the codes of who."""
        lanes, limit = np.flatnonzero(self.mask) if lanes is None else lanes, self.shared_bytes
        if space == "shared":
            if ((address < 0) | (address + size > limit)).any():
                raise FaultError(f"shared memory: an access outside of its {limit} bytes")
            address = self.program[lanes] * limit + address
        elif (address < APART).any():
            raise FaultError("an access outside of all tensors")
        numbers = np.minimum(address // APART, len(self.regions) - 1)
        for number in np.flatnonzero(np.bincount(numbers)):
            region, some = self.regions[number], np.flatnonzero(numbers == number)
            at = address[some] - number * APART - region.begin
            if ((at < 0) | (at + size > len(region.values))).any():
                raise FaultError(f"{region.name}: {size} bytes at {at.max()} are outside")
            if (address[some] % size).any():
                raise FaultError(f"{region.name}: an access of {size} bytes is not aligned")
            yield region, some, at, self.who[:, lanes[some]]

    def whole_warps(self) -> Array:
        """Return the warps that run, of which every lane must take part."""
        some = self.mask.reshape(-1, WARP)
        if (some.any(1) & ~some.all(1)).any():
            raise FaultError("an instruction of a whole warp, in which a lane takes no part")
        return np.flatnonzero(some.any(1))
