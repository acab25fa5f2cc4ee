import json
import os

import pytest

from tests.measure.record_files import CPU, GPU, content, op_row, put, step_row
from tresnet.cli.main import main as run
from tresnet.errors import InputError
from tresnet.measure.read_records import read_record, read_records


def test_a_written_record_is_read(tmp_path):
    arguments = ["--batch-size", "2", "--input-size", "32", "--rounds", "2", "--steps", "1"]
    arguments += ["--warmup-steps", "1", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert run(["bench", "infer", "tresnet_t", *arguments]) == 0
    (record,) = read_records(tmp_path)
    written = json.loads((tmp_path / record.name).read_text())
    assert record.what == "bench_infer"
    assert record.rows == written["rows"]
    assert record.command == written["command"]
    assert not record.on_gpu
    assert record.device.startswith("CPU: ")
    assert record.torch == written["environment"]["packages"]["torch"]


def test_oldest_first_and_devices_by_name_and_power(tmp_path):
    put(tmp_path, "a", "bench_train", [], date="2026-03-01T00:00:00+00:00")
    put(tmp_path, "b", "bench_train", [], date="2026-02-01T00:00:00+00:00", device=CPU)
    first, second = read_records(tmp_path)
    assert (first.name, first.device, first.on_gpu) == ("b.json", "CPU: Test CPU, 2 threads", False)
    assert (second.name, second.device) == ("a.json", "Test GPU 80GB at 700 W")


def test_records_from_before_the_format_was_numbered(tmp_path):
    path = put(tmp_path, "old", "bench_train", [step_row("tresnet_m", 10.0)])
    old = json.loads(path.read_text())
    del old["format"]
    for column in ("impl", "partitioner"):
        del old["rows"][0][column]
    path.write_text(json.dumps(old))
    assert read_record(path).rows[0]["p50_images_per_s"] == 10.0


def test_other_kinds_of_records_have_other_columns(tmp_path):
    path = put(tmp_path, "convs", "bench_convs", [{"case": "plain"}])
    assert read_record(path).rows == [{"case": "plain"}]


def damaged(change, what="bench_train", row=None):
    record = content(what, [row or step_row("tresnet_m", 10.0)], device=dict(GPU))
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"expected a record in JSON, got something else"),
        ("[]", r"expected a record, got list"),
        ("{}", r"expected environment, got only nothing"),
        (damaged(lambda r: r.update(format=2)), r"expected format 1, got format 2: .* newer"),
        (damaged(lambda r: r.pop("rows")), r"expected rows, got only format, what"),
        (damaged(lambda r: r.update(rows={})), r"expected rows of type list, got \{\}"),
        (damaged(lambda r: r.update(rows=[1])), r"expected rows of columns, got row 1 = 1"),
        (damaged(lambda r: r["rows"][0].pop("dtype")), r"expected row 1: dtype, got only model"),
        (
            damaged(lambda r: r["rows"][0].update(batch_size="many")),
            r"expected row 1: batch_size of type int, got 'many'",
        ),
        (
            damaged(lambda r: r["rows"][0].update(batch_size=True)),
            r"expected row 1: batch_size of type int, got True",
        ),
        (damaged(lambda r: r["environment"].update(device="cpu")), r"device of type dict"),
        (damaged(lambda r: r["environment"]["packages"].clear()), r"expected torch, got only"),
        (
            damaged(
                lambda r: r["rows"][0].update(shape=None), "bench_ops", op_row("copy", 1.0, 1.0)
            ),
            r"expected row 1: shape of type list, got None",
        ),
        ("", r"expected a record, got an empty file: remove it"),
        ("\n", r"expected a record, got an empty file: remove it"),
        (f'{{"format": {"1" * 5000}}}', r"expected a record in JSON, got something else"),
        (
            damaged(lambda r: r["environment"]["device"].update(power_limit_w="much")),
            r"expected device: power_limit_w of type .*, got 'much'",
        ),
        (
            damaged(lambda r: r["environment"]["device"].update(power_limit_w=float("inf"))),
            r"expected device: power_limit_w above 0 and .*, got inf",
        ),
        (
            damaged(lambda r: r["environment"]["device"].pop("name")),
            r"expected device: name, got only type, power_limit_w",
        ),
        (
            damaged(lambda r: r["environment"]["device"].update(name=None)),
            r"expected device: name of type str, got None",
        ),
        (
            damaged(
                lambda r: r["environment"].update(device=CPU, cpu={"model": 7, "torch_threads": 2})
            ),
            r"expected cpu: model of type .*, got 7",
        ),
        (
            damaged(lambda r: r["environment"].update(date_utc="yesterday")),
            r"expected environment: date_utc such as .*, got yesterday",
        ),
        (
            damaged(lambda r: r["rows"][0].update(p50_images_per_s=None)),
            r"expected row 1: p50_images_per_s above 0 where status is ok, got null",
        ),
        (
            damaged(lambda r: r["rows"][0].update(p50_images_per_s=float("nan"))),
            r"expected row 1: p50_images_per_s above 0 and .*, got nan",
        ),
        (
            damaged(lambda r: r["rows"][0].update(max_allocated_mib=-1)),
            r"expected row 1: max_allocated_mib above 0 .*, got -1",
        ),
        (
            damaged(lambda r: r["rows"][0].update(p50_images_per_s=10**400)),
            r"expected row 1: p50_images_per_s above 0 and below .*, got 1000",
        ),
        (
            damaged(lambda r: r["rows"][0].update(round_p50_images_per_s=[1.0, 0.0])),
            r"expected row 1: round_p50_images_per_s above 0.*, got \[1.0, 0.0\]",
        ),
        (
            damaged(lambda r: r["rows"][0].update(round_p50_images_per_s=[True])),
            r"expected row 1: round_p50_images_per_s of numbers, got \[True\]",
        ),
        (
            damaged(lambda r: r["rows"][0].update(partitioner=["x"])),
            r"expected row 1: partitioner of type .*, got \['x'\]",
        ),
        (
            damaged(lambda r: r["rows"][0].update(pad="yes")),
            r"expected row 1: pad of type bool, got 'yes'",
        ),
    ],
)
def test_damaged_records_are_named(tmp_path, text, message):
    (tmp_path / "damaged.json").write_text(text)
    with pytest.raises(InputError, match=rf"damaged\.json: .*{message}"):
        read_records(tmp_path)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"x\.json: expected a record, got a file that cannot be"):
        read_records(tmp_path)


def test_no_folder_and_no_records(tmp_path):
    with pytest.raises(InputError, match="expected a folder of records"):
        read_records(tmp_path / "none")
    with pytest.raises(InputError, match=r"expected records \(\*\.json\) in .*, found none"):
        read_records(tmp_path)


def test_json_nested_beyond_reading_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(InputError, match=r"deep.json: expected a record in JSON"):
        read_record(tmp_path / "deep.json")


def test_rounds_that_are_no_numbers_are_an_error_that_names_row_and_column(tmp_path):
    row = step_row("tresnet_m", 1.0) | {"round_p50_images_per_s": ["fast"]}
    put(tmp_path, "r", "bench_train", [row])
    with pytest.raises(
        InputError, match=r"row 1: round_p50_images_per_s of numbers, got \['fast'\]"
    ):
        read_records(tmp_path)


def test_a_folder_is_read_past_its_broken_files(tmp_path):
    put(tmp_path, "sound", "bench_train", [step_row("tresnet_m", 10.0)])
    (tmp_path / "empty.json").touch()
    (tmp_path / "torn.json").write_text(damaged(lambda r: None)[:-100])
    (tmp_path / "package.json").write_text('{"name": "other", "version": "1.0"}')
    told = []
    (record,) = read_records(tmp_path, lambda error: told.append(str(error)))
    assert record.name == "sound.json"
    assert [line.partition(": ")[0] for line in told] == [
        str(tmp_path / name) for name in ("empty.json", "package.json", "torn.json")
    ]
    (tmp_path / "sound.json").unlink()
    with pytest.raises(InputError, match=r"none can be read: .*empty\.json: .*; .*torn\.json: "):
        read_records(tmp_path, told.append)
    assert len(told) == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_no_record(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match="found none"):
        read_records(tmp_path)
