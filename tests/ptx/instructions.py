"""What instructions compute, as NumPy on all lanes of a wave: `TABLE`, from name to function.

Registers hold bits. `decode` reads bits as a type of PTX, and `encode` makes bits of values.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.machine import UINTS, WARP, Wave
from tests.ptx.memory import POISON, WARPS
from tests.ptx.parse import FaultError, Instruction

TYPES = {"pred": np.dtype(bool), "f16": np.dtype("f2"), "f32": np.dtype("f4")}
TYPES |= {"f64": np.dtype("f8"), "bf16": np.dtype("f4"), "tf32": np.dtype("f4")}
for bits in (8, 16, 32, 64):
    signed, unsigned = np.dtype(f"i{bits // 8}"), np.dtype(f"u{bits // 8}")
    TYPES |= {f"s{bits}": signed, f"u{bits}": unsigned, f"b{bits}": unsigned}
TF32 = ~np.uint32(0x1FFF)  # the upper 19 bits
# Words that change nothing here; shf.l.wrap is the only shift of this kind.
QUIET = {"rn", "lo", "approx", "full", "ftz", "l", "wrap"}
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
}


@functools.cache
def bits_of(kind: str) -> int:
    """Return the bits of a type: 1 of pred, 64 of f32x2."""
    return 1 if kind == "pred" else int(np.prod([int(n) for n in re.findall(r"\d+", kind)]))


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return bits as values of a type; bf16 becomes float32, and f32x2 becomes pairs."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f32x2":
        return np.ascontiguousarray(raw).view(np.float32).reshape(-1, 2)
    return raw.view(TYPES[kind])


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Return values as bits of a type; bf16 is rounded to even, tf32 away from zero at ties."""
    if kind == "f32x2":
        return np.ascontiguousarray(values, np.float32).view(np.uint64)[:, 0]
    raw = np.ascontiguousarray(values, TYPES[kind]).view(UINTS[TYPES[kind].itemsize * 8])
    if kind == "bf16":
        half = np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))
        raw = np.where(np.isnan(values), 0x7FFF, raw + half >> np.uint32(16)).astype(np.uint16)
    if kind == "tf32":
        raw = np.where(np.isfinite(values), raw + np.uint32(0x1000), raw) & TF32
    return values if kind == "pred" else raw


def read(wave: Wave, operand: str, kind: str) -> np.ndarray:
    """Return an operand as values of a type."""
    return decode(wave.read(operand, bits_of(kind)), kind)


@functools.cache
def names(operand: str) -> list[str]:
    """Return the registers of a vector such as {%r1, %r2}, or the only one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z, rounded once."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(z.dtype)


def divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x / y; of integers towards zero, and anything where y is 0."""
    if x.dtype.kind == "f":
        return x / y
    x, y = (value.astype(np.int64) for value in (x, np.where(y == 0, 1, y)))
    return np.where((x < 0) != (y < 0), -(abs(x) // abs(y)), abs(x) // abs(y))


def shifted(x: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """Return x shifted; by more bits than there are, as by one after another."""
    bits, n = x.itemsize * 8, np.minimum(by, x.itemsize * 8 - 1).astype(x.dtype)
    y = x << n if left else x >> n
    return y if x.dtype.kind == "i" and not left else np.where(by >= bits, 0, y)


def extracted(x: np.ndarray, begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return `count` bits from a place on, with the sign of their highest in a signed integer."""
    y = x.astype(np.int64) >> begin & (1 << count.astype(np.int64)) - 1
    negative = (x.dtype.kind == "i") & (y >> np.maximum(count.astype(np.int64) - 1, 0) == 1)
    return np.where(negative, y - (1 << count.astype(np.int64)), y)


def permuted(x: np.ndarray, y: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """Return four of eight bytes by the digits of a number; 8 and more repeat the sign."""
    eight, four = np.stack([x, y], 1).view(np.uint8), []
    for place in range(0, 16, 4):
        digit = digits >> np.uint32(place) & np.uint32(15)
        byte = eight[np.arange(len(x)), digit & 7]
        four.append(np.where(digit & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint8))
    return np.stack(four, 1).view(np.uint32)[:, 0]


def funnelled(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return the upper half of two registers, shifted left as one."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    return both << (by & np.uint32(31)).astype(np.uint64) >> np.uint64(32)


# Instructions whose operands and result have the type of their last word, but for some operands.
LAST_OPERAND = {"shl": "b32", "shr": "b32", "selp": "pred"}
SAME_TYPE: dict[str, Callable[..., np.ndarray]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": divided, "fma": fused},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    **{"neg": np.negative, "abs": np.abs, "ex2": np.exp2, "sqrt": np.sqrt},
    **{"bfe": extracted, "prmt": permuted, "shf": funnelled},
    "mad": lambda x, y, z: x * y + z,
    "shl": lambda x, by: shifted(x, by, True),
    "shr": lambda x, by: shifted(x, by, False),
    "selp": lambda x, y, holds: np.where(holds, x, y),
    "rem": lambda x, y: x - divided(x, y) * y,
    "min": lambda x, y: (np.fmin if x.dtype.kind == "f" else np.minimum)(x, y),
    "max": lambda x, y: (np.fmax if x.dtype.kind == "f" else np.maximum)(x, y),
}


@functools.cache
def typed(words: tuple[str, ...], count: int) -> tuple[list[str], str, bool]:
    """Return the types of operands and result, and whether the upper half is the result."""
    head, *words, kind = words
    kinds, result, extra = [kind] * count, kind, {*words} - QUIET
    kinds[-1] = LAST_OPERAND.get(head, kind)
    if extra == {"f32"} and kind in ("bf16", "f16"):  # the last operand is in float32
        kinds[-1], result, extra = "f32", "f32", set()
    if extra in ({"wide"}, {"hi"}):  # twice the bits, also of the term that is added
        result = f"{kind[0]}{2 * bits_of(kind)}"
        return [kind, kind, result][:count], result, extra == {"hi"}
    if extra:
        raise FaultError(f"unknown words {sorted(extra)}")
    return kinds, result, False


def same_type(wave: Wave, one: Instruction) -> None:
    """Run an instruction of `SAME_TYPE`; `wide` and `hi` multiply integers to twice the bits."""
    target, *operands = one.operands
    kinds, result, upper = typed(one.words, len(operands))
    kind = one.words[-1]
    values = [read(wave, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    if result != kind:
        values = [value.astype(TYPES[result]) for value in values]
    y = SAME_TYPE[one.words[0]](*values)
    wave.write(
        target,
        encode(y >> bits_of(result) // 2 if upper else y, one.words[-1] if upper else result),
    )


def compare(wave: Wave, one: Instruction) -> None:
    """Set a predicate; of NaN, `lt` is false and `ltu` is true."""
    _, word, kind = one.words
    x, y = (read(wave, operand, kind) for operand in one.operands[1:])
    nan = (x != x) | (y != y)
    if word in ("num", "nan"):
        return wave.write(one.operands[0], nan == (word == "nan"))
    plain = word if word in COMPARISONS else word.removesuffix("u")
    holds = COMPARISONS[plain](x, y)
    return wave.write(one.operands[0], holds & ~nan if plain == word else holds | nan)


def convert(wave: Wave, one: Instruction) -> None:
    """Convert; from floats to integers by saturation, as the hardware does."""
    *words, to, source = one.words[1:]
    if not {*words} <= {"rn", "rna", *ROUNDINGS}:
        raise FaultError(f"unknown words {words}")
    values = [read(wave, operand, source) for operand in one.operands[1:]]
    if to.endswith("x2"):
        high, low = (encode(value, to[:-2]).astype(np.uint32) for value in values)
        return wave.write(one.operands[0], high << np.uint32(16) | low)
    (y,), rounding = values, words[0] if words else ""
    y = ROUNDINGS[rounding](y) if rounding in ROUNDINGS else y
    if y.dtype.kind == "f" and TYPES[to].kind != "f":
        limits = np.iinfo(TYPES[to])
        y = np.clip(np.nan_to_num(y.astype(np.longdouble)), limits.min, limits.max)
    return wave.write(one.operands[0], encode(y.astype(TYPES[to]), to))


def move(wave: Wave, one: Instruction) -> None:
    """Copy; also to the parts of a vector, or from them."""
    (target, source), bits = one.operands, bits_of(one.words[1])
    part = UINTS[bits // len(names(target))]
    raw = [wave.read(name, bits // len(names(source))) for name in names(source)]
    parts = np.stack(raw, 1).view(part) if len(raw) == 1 else np.stack(raw, 1).view(UINTS[bits])
    for name, values in zip(names(target), parts.T, strict=True):
        wave.write(name, values)


def shuffle(wave: Wave, one: Instruction) -> None:
    """Read a register of another lane: `bfly` of lane ^ n, `idx` of lane n, `up` of lane - n."""
    wave.whole_warps()
    x, n, limits = (wave.read(operand, 32).reshape(-1, WARP) for operand in one.operands[1:4])
    lane, mode = np.arange(WARP), one.words[2]
    if mode not in ("bfly", "idx", "up") or (limits != (0 if mode == "up" else 31)).any():
        raise FaultError("an unknown kind of shuffle")
    by = n.astype(np.int64)
    above = np.where(lane >= by, lane - by, lane)
    source = {"bfly": lane ^ by, "idx": by, "up": above}[mode] % WARP
    wave.write(one.operands[0], np.take_along_axis(x, source, 1).reshape(-1))


def reduce(wave: Wave, one: Instruction) -> None:
    wave.whole_warps()
    x = read(wave, one.operands[1], one.words[3]).reshape(-1, WARP)
    y = {"max": np.max, "min": np.min, "add": np.sum}[one.words[2]](x, 1).astype(x.dtype)
    wave.write(one.operands[0], encode(np.repeat(y, WARP), one.words[3]))


def load(wave: Wave, one: Instruction) -> None:
    """Load a value, or a vector; signed ones are extended to wider registers."""
    space, kind, targets = one.words[1], one.words[-1], names(one.operands[0])
    size, address = bits_of(kind) // 8, wave.address(one.operands[1], space)
    if space == "param":
        data = np.array(wave.machine.parameters, np.uint64)[address // 8][:, None].view(np.uint8)
    else:
        data = wave.load(space, address, size * len(targets))
    for name, values in zip(targets, data.view(UINTS[8 * size]).T, strict=False):
        column = np.zeros(len(wave.live), UINTS[8 * size])
        column[wave.mask] = values
        wave.write(name, decode(column, kind))


def store(wave: Wave, one: Instruction) -> None:
    space, bits = one.words[1], bits_of(one.words[-1])
    columns = [wave.read(name, bits)[wave.mask] for name in names(one.operands[1])]
    address = wave.address(one.operands[0], space)
    wave.store(space, address, np.stack(columns, 1).view(np.uint8))


def add_atomically(wave: Wave, one: Instruction) -> None:
    """Add to shared memory; other warps may do so too, but must not read or write there."""
    if "shared" not in one.words or one.words[-2:] not in (("add", "u32"), ("add", "s32")):
        raise FaultError("an unknown kind of atom")
    address, values = wave.address(one.operands[1], "shared"), wave.read(one.operands[2], 32)
    for region, lanes, at, who in wave.parts("shared", address, 4):
        sums = region.values.copy().view(np.uint32)
        np.add.at(sums, at // 4, values[wave.mask][lanes])
        region.write(at, sums[at // 4][:, None].view(np.uint8), who | WARPS - 1)


def copy_ahead(wave: Wave, one: Instruction) -> None:
    """Copy to shared memory at some time until a wait; until then, what is there is poison."""
    if one.words[2] == "commit_group":
        wave.committed[wave.mask] += 1
        return
    whole, arriving, wave.pending = wave.mask, wave.pending, []
    if one.words[2] == "wait_group":
        arrived = wave.committed - int(one.operands[0])  # groups before these numbers
        for lanes, group, target, data in arriving:
            done = whole[lanes] & (group < arrived[lanes])
            wave.mask = np.isin(np.arange(len(whole)), lanes[done])
            wave.store("shared", target[done], data[done])
            if not done.all():
                wave.pending.append((lanes[~done], group[~done], target[~done], data[~done]))
    elif one.words[2] in ("ca", "cg"):
        target, source = (wave.address(one.operands[n], one.words[3 + n]) for n in (0, 1))
        size, lanes = int(one.operands[2], 0), np.flatnonzero(whole)
        reads = wave.read(one.operands[3], 32)[whole] > 0  # otherwise zeros are written
        data, wave.mask = np.zeros((len(lanes), size), np.uint8), np.zeros_like(whole)
        wave.mask[lanes[reads]] = True
        data[reads] = wave.load("global", source[reads], size)
        wave.mask = whole
        wave.store("shared", target, np.full_like(data, POISON))
        wave.pending = [*arriving, (lanes, wave.committed[lanes], target, data)]
    else:
        raise FaultError("an unknown kind of cp.async")
    wave.mask = whole


def matrices(wave: Wave, one: Instruction) -> None:
    """Load or store 8 x 8 matrices of 16 bits: lane n has the address of row n.

    Of each matrix, a lane has the elements (lane // 4, 2 * (lane % 4)) and the next one of the row.
    """
    whole, warps, count = wave.mask, wave.whole_warps(), int(one.words[4][1:])
    loads, trans = one.words[0] == "ldmatrix", "trans" in one.words
    registers, place = one.operands if loads else one.operands[::-1]
    address = wave.address(place, "shared").reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    wave.mask = whole & (np.arange(len(whole)) % WARP < 8 * count)
    lane = (..., np.arange(WARP) // 4, np.arange(WARP) % 4)
    shape = (len(warps), count, 8, 4)  # pairs of elements
    if loads:
        data = wave.load("shared", address, 16).view(np.uint16).reshape(len(warps), count, 8, 8)
        pairs = np.ascontiguousarray(data.swapaxes(2, 3) if trans else data).view(np.uint32)
        for number, name in enumerate(names(registers)):
            values = np.zeros((len(whole) // WARP, WARP), np.uint32)
            values[warps] = pairs[:, number][lane]
            wave.mask = whole
            wave.write(name, values.reshape(-1))
    else:
        pairs = np.zeros(shape, np.uint32)
        for number, name in enumerate(names(registers)):
            pairs[:, number][lane] = wave.read(name, 32).reshape(-1, WARP)[warps]
        data = pairs.view(np.uint16)
        data = np.ascontiguousarray(data.swapaxes(2, 3) if trans else data).view(np.uint8)
        wave.store("shared", address, data.reshape(-1, 16))
    wave.mask = whole


def multiply_matrices(wave: Wave, one: Instruction) -> None:
    """Return A (16, 8) @ B (8, 8) + C of each warp, in tf32 with sums in float32."""
    if one.words[3:] != ("m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"):
        raise FaultError("an unknown kind of mma")
    wave.whole_warps()
    group, four = np.arange(WARP) // 4, np.arange(WARP) % 4

    def matrix(operand: str, places: list[Any], rows: int) -> np.ndarray:
        filled = np.zeros((len(wave.live) // WARP, rows, 8))
        for name, (row, column) in zip(names(operand), places, strict=True):
            values = decode(wave.read(name, 32) & TF32, "f32")
            filled[:, row, column] = values.reshape(-1, WARP)
        return filled

    corners = [(group + down, four + right) for right in (0, 4) for down in (0, 8)]
    a = matrix(one.operands[1], corners, 16)
    product = a @ matrix(one.operands[2], [(four, group), (four + 4, group)], 8)
    places = [(group + down, 2 * four + right) for down in (0, 8) for right in (0, 1)]
    for target, term, (row, column) in zip(*map(names, one.operands[::3]), places, strict=True):
        y = product[:, row, column].reshape(-1) + read(wave, term, "f32")
        wave.write(target, encode(y, "f32"))


TABLE: dict[str, Callable[[Wave, Instruction], None]] = {
    **dict.fromkeys(SAME_TYPE, same_type),
    **{"setp": compare, "cvt": convert, "mov": move},
    **{"shfl": shuffle, "redux": reduce, "ld": load, "st": store, "cp": copy_ahead},
    "atom": add_atomically,
    **{"ldmatrix": matrices, "stmatrix": matrices, "mma": multiply_matrices},
    **dict.fromkeys(("createpolicy", "bar"), lambda wave, one: None),  # a hint; a warp's barrier
}


def execute(wave: Wave, one: Instruction) -> None:
    """Run an instruction in the lanes of `wave.mask`."""
    if one.words[0] not in TABLE:
        raise FaultError("an instruction that tests/ptx/instructions.py does not know")
    TABLE[one.words[0]](wave, one)
