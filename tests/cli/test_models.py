import pytest

import tresnet
from tresnet.cli.main import main as run


def test_list_shows_cost_and_weights(capsys):
    assert run(["list", "*_t"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["tresnet_t"]
    assert run(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"model", *tresnet.list_models()}
    assert lines["tresnet_m"].split()[1:3] == ["31,389,032", "2,048"]
    assert "tresnet_m.miil_in1k_448" in lines["tresnet_m"]


def test_info_shows_config_cost_and_shapes(capsys):
    assert run(["info", "tresnet_t", "--input-size", "64", "96", "--num-classes", "10"]) == 0
    text = capsys.readouterr().out
    assert "for one image of 64 x 96" in text
    assert ["num_classes", "10"] in [line.split() for line in text.splitlines()]
    assert run(["info", "tresnet_m"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["parameters", "31,389,032"] in rows
    assert "MACs        5,736,545,792 for one image of 224 x 224" in text
    assert ["block_size", "4"] in rows
    assert ["body.layer4", "2048", "32", "2048", "x", "7", "x", "7"] in rows
    assert "tresnet_m.miil_in1k" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("list resnet*", "expected a pattern that matches a model, got 'resnet*'"),
        ("info tresnet_m --input-size 0", "--input-size: expected at least 1 or a list, got 0"),
        ("info tresnet_m --input-size 225", "divisible by 4"),
        ("info tresnet_m --num-classes -1", "num_classes as a whole number from 0 to 10000000"),
    ],
)
def test_bad_names_and_sizes(line, message, capsys):
    assert run(line.split()) == 2
    assert message in capsys.readouterr().err
