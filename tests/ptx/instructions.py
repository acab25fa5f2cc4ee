"""What instructions compute, as NumPy on all lanes of a machine: `TABLE`, from name to function."""

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.memory import POISON
from tests.ptx.parse import FaultError, Instruction

if TYPE_CHECKING:
    from tests.ptx.machine import Machine

Array = np.ndarray
WARP = 32
ATOMIC = 2**62  # in place of a warp's bit
UINTS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# The types of PTX; bits of bf16 become float32 where they are read.
TYPES = {"pred": np.bool_, "bf16": np.uint16, "f16": np.float16, "f32": np.float32}
TYPES |= {"f64": np.float64, "tf32": np.float32, "f32x2": np.float32}
TYPES |= {f"{letter}{bits}": kind for letter in "ub" for bits, kind in UINTS.items()}
TYPES |= {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
TF32 = ~np.uint32(0x1FFF)  # the upper 19 bits
# Words that change nothing here; shf.l.wrap is the only shift of this kind.
QUIET = {"rn", "lo", "approx", "full", "ftz", "l", "wrap"}
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
COMPARISONS |= {"gt": np.greater, "ge": np.greater_equal, "num": lambda x, y: np.True_}


@functools.cache
def bits_of(kind: str) -> int:
    """Return the bits of a type: 1 of pred, 64 of f32x2."""
    return 1 if kind == "pred" else int(np.prod([int(n) for n in re.findall(r"\d+", kind)]))


def encode(values: Array, kind: str) -> Array:
    """Return values as bits of f16, of bf16 (rounded to even) or of tf32 (ties away from zero)."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if kind == "tf32":
        return np.where(np.isfinite(values), raw + np.uint32(0x1000), raw) & TF32
    half = np.uint32(0x7FFF) + (raw >> 16 & 1)
    return np.where(np.isnan(values), 0x7FFF, raw + half >> 16).astype(np.uint16)


@functools.cache
def names(operand: str) -> list[str]:
    """Return the registers of a vector such as {%r1, %r2}, or the only one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def divided(x: Array, y: Array) -> Array:
    """Return x / y; of integers towards zero, and anything where y is 0."""
    if x.dtype.kind == "f":
        return x / y
    x, y = (value.astype(np.int64) for value in (x, np.where(y == 0, 1, y)))
    return np.where((x < 0) != (y < 0), -(abs(x) // abs(y)), abs(x) // abs(y))


def extracted(x: Array, begin: Array, count: Array) -> Array:
    """Return `count` bits from a place on, with the sign of their highest in a signed integer."""
    y = x.astype(np.int64) >> begin & (1 << count.astype(np.int64)) - 1
    negative = (x.dtype.kind == "i") & (y >> np.maximum(count.astype(np.int64) - 1, 0) == 1)
    return np.where(negative, y - (1 << count.astype(np.int64)), y)


def permuted(x: Array, y: Array, digits: Array) -> Array:
    """Return four of eight bytes by the digits of a number; 8 and more repeat the sign."""
    eight = np.stack([x, y], 1).view(np.uint8)
    digit = digits[:, None] >> np.array([0, 4, 8, 12], np.uint32) & 15
    byte = np.take_along_axis(eight, digit.astype(np.int64) & 7, 1)
    byte = np.where(digit & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return byte.astype(np.uint8).view(np.uint32)[:, 0]


# Instructions whose operands and result have the type of their last word, but for some operands.
LAST_OPERAND = {"shl": "b32", "shr": "b32", "selp": "pred"}
SAME_TYPE: dict[str, Callable[..., Array]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": divided},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    **{
        "neg": np.negative,
        "abs": np.abs,
        "ex2": np.exp2,
        "sqrt": np.sqrt,
        "popc": np.bitwise_count,
    },
    **{"shl": np.left_shift, "shr": np.right_shift, "bfe": extracted, "prmt": permuted},
    "fma": lambda x, y, z: x.astype(np.longdouble) * y + z,  # rounded where it is stored
    "mad": lambda x, y, z: x * y + z,
    "shf": lambda low, high, by: (high.astype(np.uint64) << 32 | low) << (by & 31) >> 32,
    "selp": lambda x, y, holds: np.where(holds, x, y),
    "rem": lambda x, y: x - divided(x, y) * y,
    "min": lambda x, y: (np.fmin if x.dtype.kind == "f" else np.minimum)(x, y),
    "max": lambda x, y: (np.fmax if x.dtype.kind == "f" else np.maximum)(x, y),
}


@functools.cache
def typed(words: tuple[str, ...], count: int) -> tuple[list[str], str, int]:
    """Return the types of operands and result, and by how many bits the result is shifted."""
    head, *words, kind = words
    kinds, result, extra = [kind] * count, kind, {*words} - QUIET
    kinds[-1] = LAST_OPERAND.get(head, kind)
    if extra == {"f32"} and kind in ("bf16", "f16"):  # the last operand is in float32
        return [*kinds[:-1], "f32"], "f32", 0
    if extra in ({"wide"}, {"hi"}):  # twice the bits, also of the term that is added
        result = f"{kind[0]}{2 * bits_of(kind)}"
        return [kind, kind, result][:count], result, bits_of(kind) if extra == {"hi"} else 0
    if extra:
        raise FaultError(f"unknown words {sorted(extra)}")
    return kinds, result, 0


def same_type(machine: "Machine", one: Instruction) -> None:
    """Run an instruction of `SAME_TYPE`; `wide` and `hi` multiply integers to twice the bits."""
    target, *operands = one.operands
    kinds, result, upper = typed(one.words, len(operands))
    values = [machine.read(*operand) for operand in zip(operands, kinds, strict=True)]
    if result != one.words[-1]:
        values = [value.astype(TYPES[result]) for value in values]
    y = SAME_TYPE[one.words[0]](*values)
    machine.write(target, y >> upper if upper else y, one.words[-1] if upper else result)


def compare(machine: "Machine", one: Instruction) -> None:
    """Set a predicate; of NaN, `lt` is false and `ltu` is true."""
    _, word, kind = one.words
    x, y = (machine.read(operand, kind) for operand in one.operands[1:])
    nan, ordered = (x != x) | (y != y), word in COMPARISONS
    holds = COMPARISONS[word if ordered else word.removesuffix("u")](x, y)
    machine.write(one.operands[0], holds & ~nan if ordered else holds | nan, "pred")


def convert(machine: "Machine", one: Instruction) -> None:
    """Convert; from floats to integers by saturation, as the hardware does."""
    *words, to, source = one.words[1:]
    if not {*words} <= {"rn", "rna", *ROUNDINGS}:
        raise FaultError(f"unknown words {words}")
    y, *lower = (machine.read(operand, source) for operand in one.operands[1:])
    if to.endswith("x2"):
        y, low = (encode(value, to[:-2]).astype(np.uint32) for value in (y, *lower))
        y, to = y << 16 | low, "b32"
    elif words and words[0] in ROUNDINGS:
        y = ROUNDINGS[words[0]](y)
    if y.dtype.kind == "f" and to[0] in "us":
        limits = np.iinfo(TYPES[to])
        y = np.clip(np.nan_to_num(y.astype(np.longdouble)), limits.min, limits.max)
    machine.write(one.operands[0], y, to)


def move(machine: "Machine", one: Instruction) -> None:
    """Copy; also to the parts of a vector, or from them."""
    (targets, sources), bits = map(names, one.operands), bits_of(one.words[1])
    raw = [machine.read(name, f"b{bits // len(sources)}") for name in sources]
    parts = np.stack(raw, 1).view(UINTS[bits // len(targets)])
    for name, values in zip(targets, parts.T, strict=True):
        machine.write(name, values, f"b{bits // len(targets)}")


def shuffle(machine: "Machine", one: Instruction) -> None:
    """Read a register of another lane: `bfly` of lane ^ n, `idx` of lane n, `up` of lane - n."""
    machine.whole_warps()
    x, n, limits = (machine.read(operand, "b32").reshape(-1, WARP) for operand in one.operands[1:4])
    lane, mode = np.arange(WARP), one.words[2]
    if mode not in ("bfly", "idx", "up") or (limits != (0 if mode == "up" else 31)).any():
        raise FaultError("an unknown kind of shuffle")
    by = n.astype(np.int64)
    above = np.where(lane >= by, lane - by, lane)
    source = {"bfly": lane ^ by, "idx": by, "up": above}[mode] % WARP
    machine.write(one.operands[0], np.take_along_axis(x, source, 1).reshape(-1), "b32")


def reduce(machine: "Machine", one: Instruction) -> None:
    machine.whole_warps()
    x = machine.read(one.operands[1], one.words[3]).reshape(-1, WARP)
    y = {"max": np.max, "min": np.min, "add": np.sum}[one.words[2]](x, 1)
    machine.write(one.operands[0], np.repeat(y, WARP), one.words[3])


def ballot(machine: "Machine", one: Instruction) -> None:
    """Set a bit for each lane of the warp whose predicate holds."""
    machine.whole_warps()
    holds = machine.read(one.operands[1], "pred").reshape(-1, WARP)
    machine.write(one.operands[0], np.repeat((holds << np.arange(WARP)).sum(1), WARP), "b32")


def load(machine: "Machine", one: Instruction) -> None:
    """Load a value, or a vector; signed ones are extended to wider registers."""
    space, kind, targets = one.words[1], one.words[-1], names(one.operands[0])
    size, address = bits_of(kind) // 8, machine.address(one.operands[1], space)
    if space == "param":
        data = np.array(machine.parameters, np.uint64)[address // 8][:, None].view(np.uint8)
    else:
        data = machine.load(space, address, size * len(targets))
    for name, values in zip(targets, data.view(TYPES[kind]).T, strict=False):
        column = np.zeros(len(machine.live), TYPES[kind])
        column[machine.mask] = values
        machine.write(name, column, kind)


def store(machine: "Machine", one: Instruction) -> None:
    space, kind = one.words[1], f"b{bits_of(one.words[-1])}"
    columns = [machine.read(name, kind)[machine.mask] for name in names(one.operands[1])]
    address = machine.address(one.operands[0], space)
    machine.store(space, address, np.stack(columns, 1).view(np.uint8))


def add_atomically(machine: "Machine", one: Instruction) -> None:
    """Add to shared memory; other warps may do so too, but must not read or write there."""
    if "shared" not in one.words or one.words[-2:] not in (("add", "u32"), ("add", "s32")):
        raise FaultError("an unknown kind of atom")
    address = machine.address(one.operands[1], "shared")
    values = machine.read(one.operands[2], "b32")[machine.mask]
    for region, lanes, at, who in machine.parts("shared", address, 4):
        sums = region.values.copy().view(np.uint32)
        np.add.at(sums, at // 4, values[lanes])
        who[1] = ATOMIC
        region.write(at, sums[at // 4][:, None].view(np.uint8), who)


def copy_ahead(machine: "Machine", one: Instruction) -> None:
    """Copy to shared memory at some time until a wait; until then, what is there is poison."""
    kind, mask, arriving = one.words[2], machine.mask, machine.pending
    if kind == "commit_group":
        machine.committed[mask] += 1
    elif kind == "wait_group":
        machine.pending = []
        arrived = machine.committed - int(one.operands[0])  # groups before these numbers
        for copies in arriving:
            lanes, group, target, data = copies
            done = mask[lanes] & (group < arrived[lanes])
            machine.store("shared", target[done], data[done], lanes[done])
            if not done.all():
                machine.pending.append([part[~done] for part in copies])
    elif kind in ("ca", "cg"):
        target, source = (machine.address(one.operands[n], one.words[3 + n]) for n in (0, 1))
        size, lanes = int(one.operands[2], 0), np.flatnonzero(mask)
        reads = machine.read(one.operands[3], "b32")[mask] > 0  # otherwise zeros are written
        data = np.zeros((len(lanes), size), np.uint8)
        data[reads] = machine.load("global", source[reads], size, lanes[reads])
        machine.store("shared", target, np.full_like(data, POISON))
        machine.pending = [*arriving, [lanes, machine.committed[lanes], target, data]]
    else:
        raise FaultError("an unknown kind of cp.async")


def matrices(machine: "Machine", one: Instruction) -> None:
    """Load or store 8 x 8 matrices of 16 bits: lane n has the address of row n.

    Of each matrix, a lane has the elements (lane // 4, 2 * (lane % 4)) and the next one of the row.
    """
    warps, count = machine.whole_warps(), int(one.words[4][1:])
    loads, trans = one.words[0] == "ldmatrix", "trans" in one.words
    registers, place = one.operands if loads else one.operands[::-1]
    address = machine.address(place, "shared").reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    lanes = np.flatnonzero(machine.mask).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    lane, shape = (..., np.arange(WARP) // 4, np.arange(WARP) % 4), (len(warps), count, 8, 8)
    if loads:
        data = machine.load("shared", address, 16, lanes).view(np.uint16).reshape(shape)
        pairs = np.ascontiguousarray(data.swapaxes(2, 3) if trans else data).view(np.uint32)
        for number, name in enumerate(names(registers)):
            values = np.zeros((len(machine.live) // WARP, WARP), np.uint32)
            values[warps] = pairs[:, number][lane]
            machine.write(name, values.reshape(-1), "b32")
    else:
        data = np.zeros(shape, np.uint16)
        for number, name in enumerate(names(registers)):
            values = machine.read(name, "b32").reshape(-1, WARP)[warps]
            data.view(np.uint32)[:, number][lane] = values
        data = np.ascontiguousarray(data.swapaxes(2, 3) if trans else data).view(np.uint8)
        machine.store("shared", address, data.reshape(-1, 16), lanes)


def multiply_matrices(machine: "Machine", one: Instruction) -> None:
    """Return A (16, 8) @ B (8, 8) + C of each warp, in tf32 with sums in float32."""
    if one.words[3:] != ("m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"):
        raise FaultError("an unknown kind of mma")
    machine.whole_warps()
    group, four = np.arange(WARP) // 4, np.arange(WARP) % 4

    def matrix(operand: str, places: list[Any], rows: int) -> Array:
        filled = np.zeros((len(machine.live) // WARP, rows, 8))
        for name, (row, column) in zip(names(operand), places, strict=True):
            values = (machine.read(name, "b32") & TF32).view(np.float32)
            filled[:, row, column] = values.reshape(-1, WARP)
        return filled

    corners = [(group + down, four + right) for right in (0, 4) for down in (0, 8)]
    a = matrix(one.operands[1], corners, 16)
    product = a @ matrix(one.operands[2], [(four, group), (four + 4, group)], 8)
    places = [(group + down, 2 * four + right) for down in (0, 8) for right in (0, 1)]
    terms = [machine.read(term, "f32").copy() for term in names(one.operands[3])]
    for target, term, (row, column) in zip(names(one.operands[0]), terms, places, strict=True):
        machine.write(target, product[:, row, column].reshape(-1) + term, "f32")


TABLE: dict[str, Callable[["Machine", Instruction], None]] = {
    **dict.fromkeys(SAME_TYPE, same_type),
    **{"setp": compare, "cvt": convert, "mov": move},
    **{"shfl": shuffle, "redux": reduce, "vote": ballot, "ld": load, "st": store, "cp": copy_ahead},
    "atom": add_atomically,
    **{"ldmatrix": matrices, "stmatrix": matrices, "mma": multiply_matrices},
    **dict.fromkeys(("createpolicy", "bar"), lambda machine, one: None),  # a hint; a warp's barrier
}
