"""The targets, on figures made up so that each ratio can be told by heart."""

import itertools

import pytest

from tests.measure.record_files import CPU, largest_row, op_row, put, step_row
from tests.measure.test_report import cells
from tresnet.measure.ops_table import OPS
from tresnet.measure.read_records import read_records
from tresnet.measure.report import sections
from tresnet.measure.targets import TARGETS, targets_table

LATER = "2026-02-01T00:00:00+00:00"
INPLACE = {"norm": "inplace_abn", "dtype": "fp16", "channels_last": False}


def found(folder):
    """What each target of the only section measured, by the beginning of its words."""
    (section,) = sections(read_records(folder))
    table = targets_table(section)
    if not table:
        return {}
    return {line[0]: (line[1], line[2], line[3], line[4]) for line in cells(table)[1:]}


def op_rows(op, share, input_size=224):
    """The kernels and the copy of an operation at all its places; the kernels' backward last."""
    rows = []
    for contender, direction in itertools.product(("copy", "triton"), ("forward", "backward")):
        for place in OPS[op].places:
            side = input_size // place.reduction
            own = 1.0 if contender == "copy" else share
            rows.append(
                op_row(
                    contender,
                    2500.0 * own,
                    own,
                    op=op,
                    place=place.name,
                    direction=direction,
                    shape=[128, place.channels, side, side],
                )
            )
    return rows


def records_of_a_gpu(folder):
    train = [
        step_row("tresnet_m", 1000.0),
        step_row("tresnet_m", 1100.0, impl="triton"),
        step_row(
            "tresnet_m",
            1300.0,
            compile="default",
            partitioner="aggressive",
            max_allocated_mib=660.0,
        ),
        step_row("tresnet_m", 1900.0, dtype="fp16"),  # ours is to be in bf16
        step_row("tresnet_m", 1900.0, input_size=112),
        step_row("timm:tresnet_m", 1040.0, compile="default", max_allocated_mib=700.0),
        step_row("timm:tresnet_m", 800.0, max_allocated_mib=1200.0),
        step_row("tresnet_m", 500.0, max_allocated_mib=1100.0, **INPLACE),
        step_row("torchvision:resnet50", 1200.0, dtype="fp16"),
        step_row("torchvision:resnet50", 9000.0, status="not_finite"),
    ]
    put(folder, "train", "bench_train", train)
    large = [step_row("tresnet_l", 600.0, pad=True), step_row("timm:tresnet_l", 500.0)]
    put(folder, "train_l", "bench_train", large)
    huge = [step_row("tresnet_xl", 300.0, pad=True), step_row("timm:tresnet_xl", 200.0)]
    put(folder, "train_xl", "bench_train", huge)
    memory = [  # a later record, of eager cases: its speeds are no one's best
        step_row("tresnet_m", 900.0, max_allocated_mib=600.0),
        step_row("tresnet_m", 890.0, max_allocated_mib=550.0, recompute="outputs"),
        step_row("tresnet_m", 950.0, batch_size=128, max_allocated_mib=100.0),
        step_row("timm:tresnet_m", 700.0, max_allocated_mib=1000.0),
        step_row("tresnet_m", 500.0, max_allocated_mib=800.0, **INPLACE),
    ]
    put(folder, "memory", "bench_train", memory, date=LATER)
    pure = {"cast": "pure"}
    infer = [
        step_row("tresnet_m", 4000.0, fold=True, compile="default", freeze=True, **pure),
        step_row("tresnet_m", 9000.0, **pure),  # not folded
        step_row("timm:tresnet_m", 3200.0, compile="default", **pure),
        step_row("timm:tresnet_m", 3900.0, **pure),  # not compiled
    ]
    put(folder, "infer", "bench_infer", infer)
    largest = [
        largest_row("tresnet_m", 1600),
        largest_row("tresnet_m", 1800, recompute="outputs"),
        largest_row("timm:tresnet_m", 1000),
    ]
    put(folder, "largest", "bench_max_batch", largest)
    ops = [*op_rows("abn", 0.92), *op_rows("blur", 0.96), *op_rows("abn_join", 0.99)]
    slowest = next(row for row in ops if row["contender"] == "triton")
    slowest["share_of_copy"] = 0.8
    ops[-1] |= {"status": "wrong", "share_of_copy": None, "gb_per_s": None}
    put(folder, "ops", "bench_ops", ops)


def test_ratios_of_a_gpu(tmp_path):
    records_of_a_gpu(tmp_path)
    train = "training, {} ÷ {}, images/s"
    peak = "peak training memory at batch 256, tresnet_m ÷ {}, eager"
    kernels = "bandwidth of {}'s kernels at their slowest place ÷ a copy of the same bytes"
    assert found(tmp_path) == {
        # 1300 / 1040, not 950 / 700 of the later record
        train.format("tresnet_m", "timm:tresnet_m"): (
            "at least 1.15", "1.25", "yes", "`train.json`"),
        # both records gave it one setting, and this one gave ours more
        train.format("tresnet_m", "tresnet_m with inplace-abn"): (
            "at least 2", "2.60", "yes", "`train.json`"),
        train.format("tresnet_m", "torchvision:resnet50"): (
            "at least 1.1", "1.08", "no", "`train.json`"),
        train.format("tresnet_l", "timm:tresnet_l"): (
            "at least 1.25", "1.20", "no", "`train_l.json`"),
        train.format("tresnet_xl", "timm:tresnet_xl"): (
            "at least 1.25", "1.50", "yes", "`train_xl.json`"),
        "inference, tresnet_m folded ÷ timm:tresnet_m compiled, images/s": (
            "at least 1.2", "1.25", "yes", "`infer.json`"),
        peak.format("tresnet_m with inplace-abn"): ("at most 0.75", "0.60", "yes", "`train.json`"),
        peak.format("timm:tresnet_m"): ("at most 0.6", "0.55", "yes", "`train.json`"),
        "largest training batch, tresnet_m ÷ timm:tresnet_m": (
            "at least 1.6", "1.80", "yes", "`largest.json`"),
        kernels.format("abn"): ("at least 0.85", "0.80", "no", "`ops.json`"),
        kernels.format("blur"): ("at least 0.85", "0.96", "yes", "`ops.json`"),
    }  # fmt: skip


def test_kernels_reach_a_target_only_at_all_their_places(tmp_path):
    rows = op_rows("abn", 0.9)
    put(tmp_path, "whole", "bench_ops", rows)
    ((reached,),) = [[line[1:] for line in found(tmp_path).values()]]
    assert reached == ("0.90", "yes", "`whole.json`")
    others = {
        "one_place": [row for row in rows if row["place"] == "stage 1"],
        "forward": [row for row in rows if row["direction"] == "forward"],
        "failed": [*rows[:-1], {**rows[-1], "status": "failed", "share_of_copy": None}],
        "small": op_rows("abn", 0.99, input_size=32),
        "fp32": [{**row, "dtype": "fp32", "share_of_copy": 1.0} for row in rows],
        "tuned": [{**row, "contender": row["contender"] + "@warps=8"} for row in rows],
    }
    for name, part in others.items():
        put(tmp_path, name, "bench_ops", part, date=LATER)
    (line,) = found(tmp_path).values()
    assert line[3] == "`whole.json`"


def test_no_ratio_of_two_records_or_two_devices(tmp_path):
    put(tmp_path, "ours", "bench_train", [step_row("tresnet_m", 100.0)])
    put(tmp_path, "theirs", "bench_train", [step_row("timm:tresnet_m", 10.0)])
    assert found(tmp_path) == {}
    other = {"type": "cuda", "name": "Other GPU", "power_limit_w": 300.0}
    rows = [step_row("tresnet_m", 30.0), step_row("timm:tresnet_m", 20.0)]
    put(tmp_path, "other", "bench_train", rows, device=other)
    put(tmp_path, "cpu", "bench_train", rows, device=CPU)  # in bf16: no target of a CPU
    tables = {one.title: targets_table(one) for one in sections(read_records(tmp_path))}
    assert [title.partition(",")[0] for title, table in tables.items() if table] == [
        "Other GPU at 300 W"
    ]
    speed, memory = cells(tables["Other GPU at 300 W, PyTorch 2.15.0"])[1:]
    assert (speed[2], memory[2]) == ("1.50", "1.00")


def test_ratios_of_a_cpu(tmp_path):
    rows = [
        step_row("tresnet_m", 30.0, fold=True, compile="default"),
        step_row("timm:tresnet_m", 10.0, dtype="fp32"),
        step_row("timm:tresnet_m", 14.0, dtype="fp32", compile="default"),
    ]
    put(tmp_path, "infer", "bench_infer", rows, device=CPU)
    rows = [step_row("tresnet_m", 4.0, dtype="fp32"), step_row("timm:tresnet_m", 4.0, dtype="fp32")]
    put(tmp_path, "train", "bench_train", rows, device=CPU)
    assert [cell[1:3] for cell in found(tmp_path).values()] == [("3.00", "yes"), ("1.00", "no")]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_bounds_hold_on_their_own_side(ratio):
    for target in TARGETS:
        good = ratio <= target.bound if target.at_most else ratio >= target.bound
        assert target.reached_by(ratio) is good
        assert target.reached_by(target.bound)
    assert [target.bound for target in TARGETS if target.at_most] == [0.75, 0.6]
