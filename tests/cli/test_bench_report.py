from pathlib import Path

import pytest

from tests.measure.record_files import CPU, put, step_row
from tresnet.cli.bench_report import BEGIN, END
from tresnet.cli.main import main as run


@pytest.fixture
def folder(tmp_path):
    records = tmp_path / "records"
    records.mkdir()
    rows = [step_row("tresnet_m", 100.0), step_row("timm:tresnet_m", 50.0)]
    put(records, "gpu", "bench_train", rows)
    put(records, "cpu", "bench_train", rows, device=CPU)
    put(records, "convs", "bench_convs", [])
    return records


def test_the_report_is_printed(folder, capsys):
    assert run(["bench", "report", "--records", str(folder)]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("#")] == [
        "### Test GPU 80GB at 700 W, PyTorch 2.15.0",
        "### CPU: Test CPU, 2 threads, PyTorch 2.15.0",
    ]
    assert "not drawn: convs.json, a record of bench_convs" in printed.err


def test_broken_records_are_named_and_the_others_drawn(folder, capsys):
    assert run(["bench", "report", "--records", str(folder)]) == 0
    sound = capsys.readouterr()
    (folder / "empty.json").touch()  # a process was killed while it wrote
    (folder / "torn.json").write_text((folder / "gpu.json").read_text()[:-50])
    (folder / "package.json").write_text('{"name": "no record"}')
    assert run(["bench", "report", "--records", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out == sound.out
    warnings = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert [Path(line.split(": ")[2]).name for line in warnings] == [
        "empty.json",
        "package.json",
        "torn.json",
    ]
    for name in ("gpu", "cpu", "convs"):
        (folder / f"{name}.json").unlink()
    assert run(["bench", "report", "--records", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = printed.err.splitlines()
    assert error.startswith("error: expected records in ")
    assert "empty.json: expected a record, got an empty file" in error


def test_the_report_replaces_what_stands_between_the_markers(folder, tmp_path):
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "docs" / "PAGE.md", tmp_path / "pictures"
    page.parent.mkdir()
    pictures.mkdir()
    page.write_text(f"# Page\n\n{BEGIN}\nold\n{END}\n\nthe rest\n")
    arguments = ["bench", "report", "--records", str(folder), "--into", str(page)]
    arguments += ["--pictures", str(pictures)]
    for _ in range(2):
        assert run(arguments) == 0
        text = page.read_text()
        assert text.startswith(f"# Page\n\n{BEGIN}\n\n### Test GPU")
        assert text.endswith(f"\n\n{END}\n\nthe rest\n")
        assert "old" not in text
        assert text.count("| timm:tresnet_m |") == 2
        assert text.count("](../pictures/speed_") == 2
    assert len(list(pictures.iterdir())) == 4


@pytest.mark.parametrize(
    "text", ["no markers", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"]
)
def test_a_page_without_its_markers_is_left_alone(folder, tmp_path, capsys, text):
    page = tmp_path / "PAGE.md"
    page.write_text(text)
    assert run(["bench", "report", "--records", str(folder), "--into", str(page)]) == 2
    assert "once each, in this order, in" in capsys.readouterr().err
    assert page.read_text() == text


def test_bad_input(folder, tmp_path, capsys):
    def error(*arguments):
        assert run(["bench", "report", *map(str, arguments)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "expected a folder of records" in error("--records", tmp_path / "none")
    assert "expected a Markdown file" in error("--records", folder, "--into", tmp_path / "none.md")
    missing = tmp_path / "missing"
    assert "create it first" in error("--records", folder, "--pictures", missing)
    for name in ("gpu", "cpu"):
        (folder / f"{name}.json").unlink()
    assert "found others only" in error("--records", folder)
    (folder / "torn.json").write_text("{")
    assert "torn.json: expected a record in JSON" in error("--records", folder)
