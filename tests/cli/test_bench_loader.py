import json

import pytest

from tests.engine.images import write_images
from tresnet.cli.main import main as run

# timm leaves it to the garbage collector to close image files.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SHORT = ["--batch-size", "2", "--input-size", "16", "--workers", "0", "--rounds", "2"]
SHORT += ["--batches", "1", "--warmup-batches", "1"]
CASES = ["tresnet, uint8", "tresnet, float", "timm, float"]


def record_in(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_a_table_and_a_record_of_made_up_images(tmp_path, capsys):
    assert run(["bench", "loader", *SHORT, "--output-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["loader", "MiB/batch", "p50"]
    assert [line[:14] for line in lines[1:3]] == CASES[:2]
    assert "round 2 of 2 done" in printed.err
    record = record_in(tmp_path)
    assert record["what"] == "bench_loader"
    assert record["settings"]["data"] == "64 made-up JPEGs of 500 x 375"
    assert [row["case"] for row in record["rows"]] == CASES
    assert [row["batch_bytes"] for row in record["rows"]] == [
        2 * 3 * 16 * 16 * n for n in (1, 4, 4)
    ]
    assert record["rows"][0]["ratio_to_first"] == 1.0
    assert all(row["p50_images_per_s"] > 0 for row in record["rows"])


def test_images_of_ones_own(tmp_path):
    write_images(tmp_path / "mine", "val", 5)
    arguments = ["bench", "loader", *SHORT, "--split", "val", "--data", str(tmp_path / "mine")]
    assert run([*arguments, "--output-dir", str(tmp_path)]) == 0
    record = record_in(tmp_path)
    assert record["settings"]["data"] == "mine"
    assert str(tmp_path) not in json.dumps(record)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere is not a folder: check --data"),
        (["--rounds", "0"], "expected rounds of at least 1, got 0"),
        (["--workers", "-1"], "expected workers of at least 0, got -1"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    assert run(["bench", "loader", *arguments, "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []
