"""The comparison of inverting with rewriting: its figures are right and can be bad."""

import pytest
import torch

from tests.live_storages import live_after
from tresnet.errors import InputError
from tresnet.measure import inversion_error
from tresnet.measure.bench_ops import OpsSettings
from tresnet.measure.inversion_error import TENSORS, TensorError, measure_errors, tensor_error
from tresnet.measure.inversion_memory import CASES, measure_memory
from tresnet.measure.inversion_time import _operation, contenders, measure_times
from tresnet.measure.ops_table import OPS
from tresnet.ops.abn import reference

CPU = torch.device("cpu")
QUICK = OpsSettings(batch_size=2, input_size=32, repeats=2)


def errors(dtype, **options):
    """The errors of one case by variant."""
    rows = measure_errors([dtype], CPU, shape=(4, 8, 6, 6), **options)
    assert len(rows) == len({row.variant for row in rows})
    return {row.variant: row.errors for row in rows}


def test_an_error_is_relative_to_the_largest_value():
    truth = torch.tensor([1.0, -4.0, 0.0, 2.0], dtype=torch.float64)
    found = truth.float() + torch.tensor([0.0, 0.0, 0.5, 0.0])
    assert tensor_error(found, truth) == TensorError(0.125, 0.125 / 1.75, 0)
    assert tensor_error(truth.float(), truth) == TensorError(0.0, 0.0, 0)
    assert tensor_error(torch.full((2,), 0.5), torch.zeros(2)) == TensorError(0.5, 0.5, 0)


def test_values_that_are_not_finite_are_counted():
    found = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    error = tensor_error(found, torch.tensor([1.0, 1.0, 1.0, 1.0]).double())
    assert (error.max, error.not_finite, error.worst()) == (1.0, 2, float("inf"))
    nothing = tensor_error(found[1:3], torch.ones(2).double())
    assert nothing == TensorError(None, None, 2)
    assert nothing.worst() == float("inf")


@pytest.mark.parametrize("gamma", [1.0, 1e-6, 0.0])
@pytest.mark.parametrize("slope", [1e-2, 1e-6, None])
def test_ours_is_off_by_as_much_as_plain_pytorch(slope, gamma):
    found = errors("bf16", slopes=[slope], gammas=[gamma], betas=[0.1])
    assert list(found) == ["batchnorm", "recompute", "inverting", "inverting_plain"]
    for name in TENSORS:
        plain, ours = found["batchnorm"][name], found["recompute"][name]
        assert ours.not_finite == 0
        assert ours.max <= 1.01 * plain.max + 1e-7, name
        assert ours.max < 1e-2


def test_fp32_at_gamma_one_is_exact_for_all():
    for variant, found in errors("fp32", slopes=[1e-2], gammas=[1.0], betas=[0.1]).items():
        assert all(0 < found[name].max < 1e-6 for name in TENSORS), variant


def test_inverting_loses_small_gammas():
    """bf16 keeps 8 bits: beside a beta of 0.1 nothing is left of a gamma of 1e-6."""
    found = errors("bf16", slopes=[1e-3], gammas=[1e-6], betas=[0.1])
    for variant in ("inverting", "inverting_plain"):
        assert found[variant]["grad_weight"].max > 1
        assert found[variant]["output"].max < 1e-2
    zero = errors("fp16", slopes=[1e-3], gammas=[0.0], betas=[0.1])
    assert zero["inverting_plain"]["grad_x"].not_finite > 0
    assert zero["inverting"]["grad_x"].not_finite == 0


def test_a_wrong_gradient_shows(monkeypatch):
    right = inversion_error._inverting

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    monkeypatch.setattr(
        inversion_error,
        "_inverting",
        lambda *options: lambda x, *rest: right(*options)(Halved.apply(x), *rest),
    )
    found = errors("fp32", slopes=[1e-2], gammas=[1.0], betas=[0.0])
    assert found["inverting"]["grad_x"].max == pytest.approx(0.5, rel=1e-3)
    assert found["recompute"]["grad_x"].max < 1e-6


def test_memory_of_every_norm():
    pytest.importorskip("inplace_abn", reason="the inplace-abn package is not installed")
    rows = measure_memory("tresnet_t", 2, 32, CPU)
    assert [row.case for row in rows] == 2 * list(CASES)
    assert {row.network for row in rows} == {"conv, norm, conv", "tresnet_t"}
    pair = [row.kept_maps for row in rows[:4]]
    assert pair == pytest.approx([2.0, 1.0, 1.0, 1.0], rel=2e-3)
    kept = {row.case: row.kept_mib_per_image for row in rows[4:]}
    assert kept["abn"] < kept["inplace_abn"] < kept["batchnorm"]
    assert kept["inverting"] == pytest.approx(kept["abn"], rel=0.05)
    for row in rows:
        assert row.kept_bytes == pytest.approx(row.kept_mib_per_image * 2 * 2**20)
        assert row.peak_mib_per_image > row.kept_mib_per_image


def test_without_the_package_its_memory_is_left_out(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "inplace_abn.functions", None)
    rows = measure_memory("tresnet_t", 2, 32, CPU)
    assert [row.status for row in rows] == 2 * ["ok", "left_out", "ok", "ok"]
    assert "pip install" in rows[1].note


@pytest.fixture
def without_inductor(monkeypatch):
    """The compiler takes seconds for each function."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)


@pytest.mark.usefixtures("without_inductor")
def test_times_of_every_contender():
    lines = []
    timed = measure_times(["fp32", "bf16"], [2], ["contiguous"], QUICK, CPU, lines.append)
    assert [layout for layout, _ in timed] == ["contiguous"] * len(timed)
    assert [line.split(":")[0] for line in lines] == [
        "stage 2, contiguous, fp32",
        "stage 2, contiguous, bf16",
    ]
    for dtype in ("fp32", "bf16"):
        rows = [row for _, row in timed if row.dtype == dtype]
        expected = ["copy", "eager", "inductor", *contenders(dtype, CPU)]
        assert [row.contender for row in rows] == 2 * expected
        assert ("inverting_narrow" in expected) is (dtype == "bf16")
        for row in rows:
            if row.contender == "inplace_abn":
                continue
            assert (row.status, row.note) == ("ok", None)
            assert row.p50_us > 0


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("contender", "maps"),
    [
        ("eager", 2),
        ("recompute", 1),
        ("recompute+rebuild", 1),  # though a reader asks for the output in backward
        ("recompute_compiled+rebuild", 1),
        ("inverting", 1),
    ],
)
def test_what_is_timed_keeps_what_it_says(contender, maps):
    op = _operation("channels_last", "fp32", CPU)
    inputs = op.make((2, 64, 8, 8), OPS["abn"].places[0], torch.float32, CPU)
    source, function = inputs.maps[0], op.reference
    if contender != "eager":
        function = op.ours(contender)

    def forward():
        x = source * 1  # of which nobody keeps anything but the norm
        return function(x, *inputs.vectors).sum()

    alive = live_after(forward, [source])
    assert sum(shape == source.shape for shape, _ in alive) == maps


@pytest.mark.usefixtures("without_inductor")
def test_a_rebuilt_output_is_rebuilt_in_backward(monkeypatch):
    op = _operation("channels_last", "fp32", CPU)
    inputs = op.make((2, 64, 8, 8), OPS["abn"].places[0], torch.float32, CPU)
    calls, affine = [], reference.affine
    monkeypatch.setattr(reference, "affine", lambda *given: calls.append(1) or affine(*given))
    for contender, expected in (("recompute", 0), ("recompute+rebuild", 1)):
        y = op.ours(contender)(*inputs.maps, *inputs.vectors)
        calls.clear()
        torch.autograd.grad(y.sum(), inputs.differentiated())
        assert len(calls) == expected, contender


def test_bad_stages_and_a_passed_limit():
    with pytest.raises(InputError, match="stages from 1 to 4, got 5"):
        measure_times(["fp32"], [1, 5], ["channels_last"], QUICK, CPU, str)
    lines = []
    late = OpsSettings(batch_size=2, input_size=32, repeats=1, time_limit_s=1e-9)
    assert measure_times(["fp32"], [1], ["channels_last"], late, CPU, lines.append) == []
    assert lines == ["stage 1, channels_last, fp32: not begun, the time limit has passed"]


@pytest.mark.slow
def test_both_compile():
    rows = measure_times(["bf16"], [1], ["channels_last"], QUICK, CPU, str)
    compiled = [row for _, row in rows if "compiled" in row.contender]
    assert len(compiled) == 6
    assert {row.status for row in compiled} == {"ok"}
