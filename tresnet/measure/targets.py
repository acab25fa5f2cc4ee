"""What this project wants to reach against its peers, and what the records say of it.

Each figure comes from one record alone: of those that hold both sides the one that gave the peer the
most settings to be its best in, among equals the one that gave ours the most, then the newest.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from tresnet.measure.bench_ops import DIRECTIONS
from tresnet.measure.ops_table import OPS
from tresnet.measure.read_records import Record
from tresnet.measure.report import (
    Row,
    Section,
    contender,
    markdown_table,
    peak_mib,
    settings_of,
    speed_ratio,
)

_HALF = ("bf16", "fp16")
_KERNELS = ("abn", "blur", "abn_join")
_INPUT_SIZE = 224
_MEMORY_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio of one of our models to a peer.

    Attributes:
        what: in words.
        kind: of record.
        on_gpu: whether it is for a GPU.
        ours: which rows are ours.
        theirs: which rows are the peer's.
        ratio: of our rows to the peer's, in one record; None where they give none.
        bound: to be reached.
        at_most: whether the ratio shall stay below it, instead of above.
    """

    what: str
    kind: str
    on_gpu: bool
    ours: Callable[[Row], bool]
    theirs: Callable[[Row], bool]
    ratio: Callable[[Record, Sequence[Row], Sequence[Row]], float | None]
    bound: float
    at_most: bool = False

    def reached_by(self, ratio: float) -> bool:
        """Whether a ratio is good enough."""
        return ratio <= self.bound if self.at_most else ratio >= self.bound


def targets_table(section: Section) -> str:
    """The targets that the records of a section speak of, as Markdown; empty if there are none."""
    lines = []
    for target in TARGETS:
        found = _found(target, section)
        if found is not None:
            ratio, record = found
            bound = f"at {'most' if target.at_most else 'least'} {target.bound:g}"
            reached = "yes" if target.reached_by(ratio) else "no"
            lines.append([target.what, bound, f"{ratio:.2f}", reached, f"`{record.name}`"])
    if not lines:
        return ""
    header = ["what", "target", "measured", "reached", "record"]
    return f"**Targets**, each a ratio within one record:\n\n{markdown_table(header, lines)}"


def _found(target: Target, section: Section) -> tuple[float, Record] | None:
    best: tuple[tuple[int, int], float, Record] | None = None
    if target.on_gpu != section.on_gpu:
        return None
    for record in section.records:  # oldest first
        if record.what != target.kind:
            continue
        rows = [row for row in record.rows if row["status"] == "ok"]
        ours, theirs = list(filter(target.ours, rows)), list(filter(target.theirs, rows))
        ratio = target.ratio(record, ours, theirs) if ours and theirs else None
        tried = len(set(map(_settings, theirs))), len(set(map(_settings, ours)))
        if ratio is not None and (best is None or tried >= best[0]):
            best = tried, ratio, record
    return None if best is None else best[1:]


def _settings(row: Row) -> str:
    return row["contender"] if "contender" in row else settings_of(row)


def _speeds(record: Record, ours: Sequence[Row], theirs: Sequence[Row]) -> float | None:
    return speed_ratio(record, _fastest(ours), _fastest(theirs))


def _fastest(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: row["p50_images_per_s"])


def _peaks(record: Record, ours: Sequence[Row], theirs: Sequence[Row]) -> float | None:
    our_mib = [peak for row in ours if (peak := peak_mib(row)) is not None]
    their_mib = [peak for row in theirs if (peak := peak_mib(row)) is not None]
    return min(our_mib) / min(their_mib) if our_mib and their_mib else None


def _batches(record: Record, ours: Sequence[Row], theirs: Sequence[Row]) -> float | None:
    return max(row["largest_batch"] for row in ours) / max(row["largest_batch"] for row in theirs)


def _least_share(record: Record, ours: Sequence[Row], theirs: Sequence[Row]) -> float | None:
    """Of kernels timed at all their places, at the size the models have there; else None."""
    op = OPS[ours[0]["op"]]
    sides = {place.name: _INPUT_SIZE // place.reduction for place in op.places}
    timed = {
        (row["place"], row["direction"]): row["share_of_copy"]
        for row in ours
        if row["shape"][2:3] == [sides.get(row["place"])]
    }
    wanted = set(itertools.product(sides, DIRECTIONS))
    return min(timed.values()) if set(timed) == wanted and None not in timed.values() else None


def _is(name: str, dtypes: Sequence[str], **columns: object) -> Callable[[Row], bool]:
    """Rows of a contender at 224 pixels."""
    return lambda row: (
        contender(row) == name
        and row["dtype"] in dtypes
        and row["input_size"] == _INPUT_SIZE
        and all(row[column] == value for column, value in columns.items())
    )


def _timed(op: str, name: str) -> Callable[[Row], bool]:
    return lambda row: row["op"] == op and row["contender"] == name and row["dtype"] == "bf16"


def _compiled(name: str) -> Callable[[Row], bool]:
    every = _is(name, _HALF)
    return lambda row: every(row) and row["compile"] != "none"


def _training(model: str, peer: str, bound: float) -> Target:
    return Target(
        f"training, {model} ÷ {peer}, images/s",
        "bench_train",
        True,
        _is(model, ("bf16",)),
        _is(peer, _HALF),
        _speeds,
        bound,
    )


def _memory(peer: str, bound: float) -> Target:
    return Target(
        f"peak training memory at batch {_MEMORY_BATCH}, tresnet_m ÷ {peer}, eager",
        "bench_train",
        True,
        _is("tresnet_m", ("bf16",), batch_size=_MEMORY_BATCH),
        _is(peer, _HALF, batch_size=_MEMORY_BATCH, compile="none"),
        _peaks,
        bound,
        at_most=True,
    )


TARGETS = (
    _training("tresnet_m", "timm:tresnet_m", 1.15),
    _training("tresnet_m", "tresnet_m with inplace-abn", 2.0),
    _training("tresnet_m", "torchvision:resnet50", 1.1),
    _training("tresnet_l", "timm:tresnet_l", 1.25),
    _training("tresnet_xl", "timm:tresnet_xl", 1.25),
    Target(
        "inference, tresnet_m folded ÷ timm:tresnet_m compiled, images/s",
        "bench_infer",
        True,
        _is("tresnet_m", ("bf16",), fold=True),
        _compiled("timm:tresnet_m"),
        _speeds,
        1.2,
    ),
    _memory("tresnet_m with inplace-abn", 0.75),
    _memory("timm:tresnet_m", 0.6),
    Target(
        "largest training batch, tresnet_m ÷ timm:tresnet_m",
        "bench_max_batch",
        True,
        _is("tresnet_m", ("bf16",), limited_by="memory"),
        _is("timm:tresnet_m", _HALF, limited_by="memory"),
        _batches,
        1.6,
    ),
    *(
        Target(
            f"bandwidth of {op}'s kernels at their slowest place ÷ a copy of the same bytes",
            "bench_ops",
            True,
            _timed(op, "triton"),
            _timed(op, "copy"),
            _least_share,
            0.85,
        )
        for op in _KERNELS
    ),
    Target(
        "inference on a CPU, tresnet_m folded ÷ timm:tresnet_m in fp32, eager, images/s",
        "bench_infer",
        False,
        _is("tresnet_m", ("fp32", *_HALF), fold=True),
        _is("timm:tresnet_m", ("fp32",), compile="none"),
        _speeds,
        2.0,
    ),
    Target(
        "training on a CPU in fp32, tresnet_m ÷ timm:tresnet_m, images/s",
        "bench_train",
        False,
        _is("tresnet_m", ("fp32",)),
        _is("timm:tresnet_m", ("fp32",)),
        _speeds,
        1.2,
    ),
)
