import json

import pytest
import torch

from tresnet.cli import bench as command
from tresnet.cli.main import INTERRUPTED_EXIT_CODE
from tresnet.cli.main import main as run
from tresnet.measure import bench
from tresnet.measure.cases import BenchCase
from tresnet.measure.read_records import read_records
from tresnet.measure.results import BenchInterrupt, BenchRow

SHORT = ["--batch-size", "2", "--input-size", "32", "--rounds", "2", "--steps", "1"]
SHORT += ["--warmup-steps", "1", "--device", "cpu"]


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_bench_prints_a_table_and_writes_a_record(tmp_path, capsys):
    models = ["tresnet_t", "timm:test_resnet@channels_last=true,batch_size=3"]
    arguments = ["bench", "train", *models, *SHORT, "--output-dir", str(tmp_path)]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    header, ours, theirs = printed.out.splitlines()
    assert header.split()[:2] == ["case", "size"]
    assert ours.startswith("tresnet_t, batch 2, fp32, abn ")
    assert theirs.startswith("timm:test_resnet, batch 3, fp32, channels_last ")
    assert "round 2 of 2 done" in printed.err
    (record,) = records(tmp_path)
    assert record["what"] == "bench_train"
    assert record["command"].startswith("tresnet bench train tresnet_t timm:test_resnet@")
    assert str(tmp_path) not in json.dumps(record)
    assert record["warmup_steps"] == 1
    assert record["runs"] == 2
    assert record["settings"]["interleave"] is True
    assert record["settings"]["method"]["optimizer"].startswith("SGD")
    assert [row["batch_size"] for row in record["rows"]] == [2, 3]
    assert [row["max_allocated_mib"] for row in record["rows"]] == [None, None]


def test_records_are_not_overwritten(tmp_path):
    for _ in range(2):
        assert run(["bench", "infer", "tresnet_t", *SHORT, "--output-dir", str(tmp_path)]) == 0
    assert len(records(tmp_path)) == 2


def test_an_interrupted_run_leaves_its_record(tmp_path, monkeypatch, capsys):
    row = BenchRow(BenchCase("tresnet_t"), status="interrupted", error="not timed")

    def interrupted(*arguments, **options):
        raise BenchInterrupt([row])

    monkeypatch.setattr(bench, "bench_infer", interrupted)
    arguments = ["bench", "infer", "tresnet_t", *SHORT, "--output-dir", str(tmp_path)]
    assert run(arguments) == INTERRUPTED_EXIT_CODE
    (record,) = records(tmp_path)
    assert record["rows"][0]["status"] == "interrupted"
    assert "error: interrupted" in capsys.readouterr().err
    (read,) = read_records(tmp_path)
    assert read.rows == record["rows"]


def test_infer_states_its_cast(tmp_path):
    models = ["timm:test_resnet", "timm:test_resnet@cast=autocast"]
    arguments = ["bench", "infer", *models, *SHORT, "--dtype", "bf16", "--sequential"]
    assert run([*arguments, "--output-dir", str(tmp_path)]) == 0
    (record,) = records(tmp_path)
    assert [row["cast"] for row in record["rows"]] == ["pure", "autocast"]
    assert [row["ratio_to_first"] for row in record["rows"]] == [None, None]


def test_a_case_out_of_memory_is_exit_code_1_and_the_record_is_kept(tmp_path, monkeypatch, capsys):
    prepare = bench.prepare

    def out_of_memory(case, *arguments):
        if case.batch_size == 3:
            raise MemoryError("too large")
        return prepare(case, *arguments)

    monkeypatch.setattr(bench, "prepare", out_of_memory)
    arguments = ["bench", "infer", "tresnet_t@batch_size=3", "tresnet_t", *SHORT]
    assert run([*arguments, "--output-dir", str(tmp_path)]) == command.PARTLY_FAILED_EXIT_CODE
    (record,) = records(tmp_path)
    assert [row["status"] for row in record["rows"]] == ["out_of_memory", "ok"]
    assert capsys.readouterr().out.splitlines()[1].split()[-6:] == ["-"] * 5 + ["out_of_memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least one model to measure, got none"),
        (["tresnet_y"], "unknown model 'tresnet_y'; did you mean 'tresnet_"),
        (["tresnet_t@dtype=fp8"], "expected dtype out of fp32, bf16, fp16, got 'fp8'"),
        (["tresnet_t@speed=high"], "expected MODEL@key=value"),
        (["tresnet_t", "--batch-size", "0"], "expected batch size of at least 1, got 0"),
        (["tresnet_t", "--batch-size", "9" * 20], "expected batch size of at most 2147483647, got"),
        (["tresnet_t", "--input-size", "9" * 20], "expected input size of at most 2147483647, got"),
        (["tresnet_t", "--batch-size"], "expected at least one batch size, got none"),
        (["tresnet_t@batch_size=\u00b2"], "expected batch_size= a whole number, got '\u00b2'"),
        (["tresnet_t@batch_size=" + "9" * 5000], "expected batch_size= a whole number, got '99"),
        (["tresnet_t@norm="], "expected a value after norm=, got none"),
        (["tresnet_t@pad=true,pad=false"], "expected pad= once for tresnet_t, got it again"),
        (
            ["tresnet_t", "--time-limit-s", "inf"],
            "expected a time limit above 0 s, got inf",
        ),
        (
            ["tresnet_t", "--time-limit-s", "nan"],
            "expected a time limit above 0 s, got nan",
        ),
        (["tresnet_t", "--rounds", "0"], "expected rounds of at least 1, got 0"),
        (["tresnet_t", "--device", "gpu"], "expected a device such as cpu or cuda:0, got 'gpu'"),
        (["tresnet_t", "--input-size", "33"], "divisible by 2"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    assert run(["bench", "train", *arguments, "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert records(tmp_path) == []


def test_directory_is_checked_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "prepare", lambda *args: pytest.fail("a model was built"))
    (tmp_path / "file").write_text("")
    assert run(["bench", "infer", "tresnet_t", "--output-dir", str(tmp_path / "file")]) == 2
    assert "expected a directory that records can be written to" in capsys.readouterr().err


EVERY = {
    "train": ["tresnet_t", *SHORT[:-2]],
    "infer": ["tresnet_t", *SHORT[:-2]],
    "max-batch": ["tresnet_t", "--first", "2", "--granularity", "2", "--at-most", "2"],
    "ops": ["blur", "--batch-size", "2", "--input-size", "32"],
    "branches": ["--rounds", "0"],
    "convs": ["--rounds", "0"],
}


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", "expected a device that computes"),
        ("banana", "expected a device such as cpu or cuda:0"),
        ("", "expected a device such as cpu or cuda:0"),
        ("cuda:99", "but PyTorch sees"),
        ("xpu:7", "expected a device of this machine"),
    ],
)
def test_devices_that_are_none_leave_nothing(kind, device, message, tmp_path, capsys):
    arguments = ["bench", kind, *EVERY[kind], "--device", device]
    assert run([*arguments, "--output-dir", str(tmp_path / "a" / "b")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [*EVERY, "loader"])
def test_every_directory_is_checked_before_the_work(kind, tmp_path, capsys):
    (tmp_path / "file").touch()
    device = [] if kind == "loader" else ["--device", "cpu"]
    for name in ("file", "file/sub"):
        arguments = ["bench", kind, *EVERY.get(kind, []), *device]
        assert run([*arguments, "--output-dir", str(tmp_path / name)]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("error: expected a directory that records can be written to")


def test_max_batch_prints_a_table_and_writes_a_record(tmp_path, capsys):
    arguments = ["bench", "max-batch", "tresnet_t", "timm:test_resnet@channels_last=true"]
    arguments += ["--input-size", "32", "--first", "2", "--granularity", "2", "--at-most", "4"]
    assert run([*arguments, "--device", "cpu", "--output-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    ours, theirs = printed.out.splitlines()[1:]
    assert ours.split() == [
        "tresnet_t,",
        "batch",
        "4,",
        "fp32,",
        "abn",
        "4",
        "at",
        "most",
        "4",
        "-",
        "ok",
    ]
    assert theirs.startswith("timm:test_resnet, batch 4, fp32, channels_last ")
    assert "tresnet_t, batch 2, fp32, abn: fits" in printed.err
    (record,) = read_records(tmp_path)
    assert record.what == "bench_max_batch"
    assert [row["largest_batch"] for row in record.rows] == [4, 4]
    assert record.rows[0]["tries"] == [[2, True], [4, True]]


def test_ops_print_a_table_and_write_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # seconds each
    arguments = ["bench", "ops", "abn_se", "--batch-size", "2", "--input-size", "32"]
    arguments += ["--repeats", "1", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    contenders = ["copy", "eager", "inductor", "recompute", "triton"]
    assert len(lines) == 1 + 2 * len(contenders)
    assert lines[0].split()[-5:] == ["p50", "us", "GB/s", "x", "copy"]
    assert lines[5].split()[-4:] == ["triton", "left_out", "-", "-"]
    assert "triton, abn_se: " in printed.err
    (record,) = read_records(tmp_path)
    assert [row["contender"] for row in record.rows] == 2 * contenders
    assert record.settings["method"]["copy"].startswith("clone of half the ideal bytes")


def test_bad_input_of_max_batch_and_ops(tmp_path, capsys):
    def error(*arguments):
        assert run(["bench", *arguments, "--device", "cpu", "--output-dir", str(tmp_path)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "expected at_most on cpu, got none" in error("max-batch", "tresnet_t")
    assert "at least one model" in error("max-batch", "--at-most", "64")
    assert "expected an operation out of abn" in error("ops", "conv")
    assert "divisible by 32, got 100" in error("ops", "--input-size", "100")
    largest = ["max-batch", "tresnet_t", "--at-most", "64"]
    assert "time limit above 0 s, got inf" in error(*largest, "--time-limit-s", "inf")
    assert "memory limit above 0 GiB, got nan" in error(*largest, "--memory-gib", "nan")
    quick = ["blur", "--batch-size", "2", "--input-size", "32"]
    assert "time limit above 0 s, got inf" in error("ops", *quick, "--time-limit-s", "inf")
    assert "got nothing: allow more time" in error("ops", *quick, "--time-limit-s", "1e-9")
    assert records(tmp_path) == []


def test_a_peer_that_refuses_its_input_ends_its_own_case_alone(tmp_path, capsys):
    """timm's ViT asserts its input size."""
    peer = "timm:vit_tiny_patch16_224"
    arguments = ["bench", "train", "timm:test_resnet", peer, *SHORT]
    assert run([*arguments, "--output-dir", str(tmp_path)]) == command.PARTLY_FAILED_EXIT_CODE
    (record,) = read_records(tmp_path)
    assert [row["status"] for row in record.rows] == ["ok", "failed"]
    assert record.rows[1]["error"].startswith("AssertionError: Input height (32)")
    capsys.readouterr()
    arguments = ["bench", "max-batch", peer, "--input-size", "32", "--first", "2"]
    arguments += ["--granularity", "2", "--at-most", "2", "--device", "cpu"]
    assert run([*arguments, "--output-dir", str(tmp_path)]) == 1
    assert "failed" in capsys.readouterr().out


def test_memory_that_is_full_is_no_traceback(tmp_path, capsys):
    arguments = ["bench", "loader", "--batch-size", "1000000000000", "--input-size", "32"]
    arguments += ["--workers", "0", "--output-dir", str(tmp_path)]
    assert run(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: the memory is full: ")
    assert records(tmp_path) == []


@pytest.mark.gpu
def test_bench_on_a_gpu_uses_it_by_default(tmp_path, capsys):
    arguments = ["bench", "train", "tresnet_t", "--batch-size", "8", "16", "--rounds", "2"]
    assert run([*arguments, "--steps", "2", "--output-dir", str(tmp_path)]) == 0
    (record,) = records(tmp_path)
    assert record["environment"]["device"]["type"] == "cuda"
    assert [row["dtype"] for row in record["rows"]] == ["bf16", "bf16"]
    assert all(row["max_allocated_mib"] > 0 for row in record["rows"])
    assert all(row["rss_peak_mib"] is None for row in record["rows"])
