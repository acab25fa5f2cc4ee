"""Test benchmarks/tables.py: a section for each device, a table for each record, and errors."""

import json

from benchmarks.tables import main

GPU = {"type": "cuda", "name": "Test GPU 80GB", "power_limit_w": 700.0}
ABOUT = {"cpu": {"model": "Test CPU", "torch_threads": 2}, "packages": {"torch": "2.15.0"}}


def put(folder, name, what, rows, device, version=3):
    about = {**ABOUT, "date_utc": "2026-01-01T00:00:00+00:00", "device": device}
    record = {"what": what, "command": f"tresnet {name}", "environment": about, "rows": rows}
    record["format"] = version
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_sections_tables_and_failures(tmp_path, capsys):
    assert main(str(tmp_path)) == 1  # there are no records
    fine = {"status": "ok", "model": "tresnet_m", "batch_size": 64, "amp": "bf16", "fold": True}
    speed = {"p50_images_per_s": 1234.56, "ratio_to_first": 1.25, "max_allocated_mib": 2048.0}
    full = {**fine, "status": "out_of_memory", "error": "CUDA out of\nmemory"}
    put(tmp_path, "train", "bench_train", [{**fine, **speed}, full], GPU)
    replayed = {**fine, **speed, "replayed": True}
    for version, name in ((2, "old"), (3, "new")):  # format 2 leaves out a graph's memory
        put(tmp_path, name, "bench_train", [{**replayed, "model": name}], GPU, version)
    op = {"status": "ok", "op": "abn", "place": "stage 1", "dtype": "fp32", "direction": "forward"}
    op |= {"contender": "copy", "gb_per_s": 9.5, "ratio_to_copy": 1.0}
    put(tmp_path, "ops", "bench_ops", [op], {"type": "cpu"})
    put(tmp_path, "study", "bench_convs", [], GPU)
    assert main(str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "### Test GPU 80GB at 700 W, PyTorch 2.15.0",
        "### CPU: Test CPU, 2 threads, PyTorch 2.15.0",
    ]
    assert "| tresnet_m | 64 | amp bf16, fold | 1,234.6 | 1.250 | 2,048 |" in lines
    assert "| old | 64 | amp bf16, fold, replayed | 1,234.6 | 1.250 | - |" in lines
    assert "| new | 64 | amp bf16, fold, replayed | 1,234.6 | 1.250 | 2,048 |" in lines
    assert any(line.endswith("| - | out of memory: CUDA out of memory |") for line in lines)
    assert "| abn | stage 1 | fp32 | forward | copy | 9.5 | 100% |" in lines
    assert "Record: `ops.json` (2026-01-01T00:00:00+00:00), `tresnet ops`" in lines
