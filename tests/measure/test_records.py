import json
import re
import threading

import pytest
import torch

from tresnet import environment
from tresnet.errors import WriteError
from tresnet.measure import records
from tresnet.measure.records import RecordFile, public_command

ROWS = [{"model": "tresnet_t", "p50_images_per_s": 10.0, "max_allocated_mib": None}]


def write(folder, rows=ROWS, **changes):
    arguments = {
        "device": "cpu",
        "settings": {"seed": 0},
        "warmup_steps": 3,
        "runs": 20,
        "argv": ["/opt/env/bin/tresnet", "bench", "--output-dir=/tmp/somewhere/records"],
    }
    return RecordFile(folder, "bench_train", **{**arguments, **changes}).write(rows)


def test_record_holds_what_is_needed_to_repeat_it(tmp_path):
    content = json.loads(write(tmp_path / "benchmarks" / "records").read_text())
    packages = content.pop("environment")["packages"]
    assert packages["torch"] == torch.__version__.partition("+")[0]
    about = {"format": 4, "what": "bench_train", "command": "tresnet bench --output-dir=records"}
    about |= {"settings": {"seed": 0}, "warmup_steps": 3, "runs": 20}
    assert content == {**about, "rows": ROWS}


def test_name_says_what_where_and_when_and_existing_records_stay(tmp_path, monkeypatch):
    version = re.escape(torch.__version__.partition("+")[0])
    first = write(tmp_path)
    assert re.fullmatch(rf"bench_train_cpu_torch{version}_\d{{4}}-\d\d-\d\d\.json", first.name)
    before = first.read_bytes()
    second, third = write(tmp_path, runs=1), write(tmp_path, runs=2)
    assert [second.name, third.name] == [f"{first.stem}_2.json", f"{first.stem}_3.json"]
    assert first.read_bytes() == before
    gpu = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(environment, "describe", lambda device: {"device": gpu})
    assert write(tmp_path).name.startswith("bench_train_h100-80gb-hbm3_torch")


def test_writers_at_the_same_time_get_a_file_each(tmp_path):
    threads = [threading.Thread(target=write, args=(tmp_path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = list(tmp_path.iterdir())
    assert len(files) == 8
    assert all(json.loads(file.read_text())["what"] == "bench_train" for file in files)


def test_a_record_is_rewritten_atomically(tmp_path, monkeypatch):
    record = RecordFile(tmp_path / "new", "bench_ops", device="cpu", settings={}, argv=["tresnet"])
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write([{"loss": float("nan")}])
    for count in (1, 2):
        path = record.write([{"op": "abn"}] * count)
        content = json.loads(path.read_text())
        assert (len(content["rows"]), content["warmup_steps"], content["runs"]) == (count, 0, 1)
    before = path.read_bytes()

    def full(path, text):
        raise WriteError("No space left on device")

    monkeypatch.setattr(records, "write_text", full)
    with pytest.raises(WriteError):
        record.write([{"op": "blur"}])
    assert [one.read_bytes() for one in path.parent.iterdir()] == [before]
    with pytest.raises(WriteError):
        write(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_absolute_paths_lose_their_directories():
    absolute = (
        r"--data=/home/someone/imagenet ~/a.pth C:\Users\me\b.pth \\server\share\c.pth a=/x/y"
    )
    relative = "benchmarks/records timm:resnet50@compile=default,batch_size=8 --batch-size"
    assert public_command([*absolute.split(), *relative.split()]) == (
        f"--data=imagenet a.pth b.pth c.pth a=y {relative}"
    )
