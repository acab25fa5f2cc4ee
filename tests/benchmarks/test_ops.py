"""Test benchmarks/ops.py: places are those of the model, and implementations agree."""

import json

import pytest
import torch

from benchmarks.ops import IDEAL, SITES, Options, by_autograd, by_kernels, main, make_inputs, plain
from tests.ops.kernels import DEVICE, large_tiles  # noqa: F401  quickens the interpreter
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.norm import NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.measure import runner
from tresnet.models.zoo import build
from tresnet.ops.tiles import interpreted

SMALL = {"batch_size": 2, "input_size": 32, "rounds": 2}


def test_a_record_and_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner.gc, "collect", int)  # a collection takes longer than the measurement
    options = Options(ops=("abn_blur",), device="cpu", output_dir=tmp_path, **SMALL)
    assert main(options) == 0
    (path,) = tmp_path.glob("bench_ops_cpu_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3 * 2 * 2  # places, directions, contenders
    for row in rows:
        assert row["gb_per_s"] == pytest.approx(row["ideal_bytes"] / row["p50_us"] / 1e3)
        assert (row["ratio_to_copy"] == 1.0) == (row["contender"] == "copy")
    first, blur = rows[0], rows[-1]
    assert (first["op"], first["place"], first["dtype"]) == ("abn_blur", "into stage 2", "fp32")
    assert first["ideal_bytes"] == 2.25 * 2 * 128 * 8 * 8 * 4
    assert blur["ideal_bytes"] == 3.5 * 2 * 512 * 2 * 2 * 4  # backward reads and writes 3.5 maps
    assert f"{first['gb_per_s']:.1f}" in capsys.readouterr().out


@pytest.mark.skipif(not interpreted(), reason="without Triton's interpreter this needs a GPU")
@pytest.mark.parametrize("op", IDEAL)
def test_kernels_compute_what_plain_operators_do(op):
    site = next(one for one in SITES if one.op == op)
    site = site._replace(channels=4, reduction=8, se=site.se and 4)
    torch.manual_seed(0)
    inputs = make_inputs(site, torch.device(DEVICE), Options(**SMALL))
    (y, backward), (exact, expected) = by_kernels(inputs), by_autograd(plain, inputs)
    for a, b in zip([y, *backward()], [exact, *expected()], strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5, check_stride=False)


def test_places_are_those_of_the_model():
    norms, gates, blurs = set(), set(), set()

    def note(module, arguments, output):
        place = arguments[0].shape[1], 224 // arguments[0].shape[2]
        if isinstance(module, SqueezeExcite):
            gates.add((*place, module.fc1.out_channels))
        elif isinstance(module, BlurPool2d):
            blurs.add(place)
        elif isinstance(module, NormAct):
            norms.add((*place, module.slope))

    model = build("tresnet_m", device="meta")
    for part in model.body.modules():
        part.register_forward_hook(note)
    model(torch.empty(2, 3, 224, 224, device="meta"))
    places = {op: {(s.channels, s.reduction) for s in SITES if s.op == op} for op in IDEAL}
    for op, _, channels, reduction, se in SITES:
        assert (channels, reduction, None if op == "abn_join" else 1e-3) in norms
        assert not se or (channels, reduction, se) in gates
    # each place of the model is measured
    assert places["abn_join"] == {place[:2] for place in norms if place[2] is None}
    assert places["abn_blur"] == blurs
