import getpass
import json
import re
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tresnet import devices, environment
from tresnet.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def test_description_is_complete_json_without_paths_names_or_a_call_of_cuda(monkeypatch):
    for name in ("cuda._lazy_init", "_C._cuda_init", "cuda.get_device_properties"):
        monkeypatch.setattr(f"torch.{name}", None, raising=False)
    described = environment.describe()
    text = json.dumps(described)
    assert json.loads(text) == described
    assert described["device"] == environment.describe("cpu")["device"] == {"type": "cpu"}
    assert datetime.fromisoformat(described["date_utc"]).utcoffset().total_seconds() == 0
    assert described["python"].count(".") == 2
    assert described["cpu"]["torch_threads"] == torch.get_num_threads()
    assert described["cpu"]["logical_cores"] >= 1
    assert described["packages"]["torch"].startswith("2.")
    assert set(described["packages"]) >= {"torchvision", "timm", "triton", "inplace-abn"}
    assert str(ROOT) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    for private in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf'"{re.escape(private)}[".]', text)


def test_commit_and_dirty_flag_of_this_checkout_alone(tmp_path, monkeypatch):
    root, code = tmp_path / "checkout", tmp_path / "checkout" / "tresnet"
    code.mkdir(parents=True)
    (code / "a.py").write_text("1")
    git = ("git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org")
    for command in (("init",), ("add", "."), ("commit", "-m", "first")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    assert re.fullmatch(r"[0-9a-f]{40}", environment._git_state(root)["commit"])
    (root / "notes.txt").write_text("a record must not make the checkout dirty")
    assert environment._git_state(root)["dirty"] is False
    (code / "b.py").write_text("2")
    assert environment._git_state(root)["dirty"] is True
    (code / "b.py").unlink()
    (code / "a.py").write_text("3")
    assert environment._git_state(root)["dirty"] is True
    assert environment._git_state(tmp_path) is environment._git_state(code) is None
    monkeypatch.setenv("PATH", "")
    assert environment._git_state(root) is None


def test_auto_is_chosen_for_the_user_and_what_no_clock_can_time_is_refused(monkeypatch):
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert devices.usable_device("auto") == torch.device(default)
    assert devices.timed_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(devices, "usable_device", torch.device)
    with pytest.raises(InputError, match="expected a device that can be timed, cpu or cuda"):
        devices.timed_device("mps")


def test_without_nvml_nothing_is_known_of_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    devices._nvml.cache_clear()
    assert devices.nvml_handle("cuda:0") is None
    assert devices.device_used_bytes(None) is None
    devices._nvml.cache_clear()


@pytest.mark.gpu
def test_a_gpu_is_described_and_nvml_reads_the_one_that_cuda_uses():
    described = environment.describe("cuda")["device"]
    properties = torch.cuda.get_device_properties("cuda")
    assert described["name"] == properties.name
    assert described["memory_mib"] == properties.total_memory / 2**20
    assert described["compute_capability"] == f"{properties.major}.{properties.minor}"
    assert described["multiprocessors"] == properties.multi_processor_count
    handle = devices.nvml_handle("cuda")
    if handle is None:
        pytest.skip("NVML does not know this GPU")
    assert described["driver"]
    before = devices.device_used_bytes(handle)
    block = torch.zeros(2**30 // 4, device="cuda")
    assert devices.device_used_bytes(handle) - before > 2**29
    del block
