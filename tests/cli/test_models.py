import tresnet
from tresnet.cli.main import main as run
from tresnet.cli.output import format_table


def test_numbers_and_absent_values_are_aligned_right():
    table = format_table(["model", "n"], [["b", "1,000.5"], ["c", "-"]])
    assert table.splitlines() == ["model        n", "b      1,000.5", "c            -"]


def test_list_shows_cost_and_weights(capsys):
    assert run(["list", "*_t"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model      parameters  features  weights",
        "tresnet_t   1,459,816       512  tresnet_t.digits",
    ]
    assert run(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"model", *tresnet.list_models()}
    assert lines["tresnet_m"].split()[1:3] == ["31,389,032", "2,048"]
    assert "tresnet_m.miil_in1k_448" in lines["tresnet_m"]


def test_info_of_weights_shows_their_model_and_classes(tmp_path, capsys):
    path = tmp_path / "mine.pth"
    model = tresnet.create("tresnet_t", num_classes=2, layers=(1, 9, 1, 1), block_size=2)
    tresnet.save_checkpoint(model, path, metadata={"classes": ["cat", "dog"]})
    for name, classes in ((str(path), "cat, dog"), ("tresnet_t.digits", "0, 1, 2, 3, 4, 5")):
        assert run(["info", name]) == 0
        text = capsys.readouterr().out
        assert f"classes     {classes}" in text
        count = sum(p.numel() for p in tresnet.create(weights=name).parameters())
        assert f"parameters  {count:,}" in text
        assert "512 x 2 x 2" in text  # of 32 pixels, with block_size=2


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
