import getpass
import json
import re
import socket
import subprocess
import sys
import types
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tresnet import env
from tresnet.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def nvml(by_uuid=(), loads=True):
    """Return a stand-in for pynvml, which finds GPUs by their UUIDs."""
    return types.SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: {True: None}[loads],
        nvmlDeviceGetHandleByUUID=Mock(side_effect=dict(by_uuid).__getitem__),
        nvmlDeviceGetMemoryInfo={"gpu": types.SimpleNamespace(used=662 * 2**20)}.__getitem__,
        nvmlSystemGetDriverVersion=lambda: b"580.65",
        nvmlDeviceGetPowerManagementLimit={"gpu": 700_000}.__getitem__,
    )


UUID = "11111111-2222-3333-4444-555555555555"
CAPACITY = {"total_memory": 80 * 2**30, "multi_processor_count": 132, "major": 9, "minor": 0}
PROPERTIES = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=UUID, **CAPACITY)
HANDLES = {f"GPU-{UUID}": "gpu"}


@pytest.fixture
def install(monkeypatch):
    """Return a function that replaces pynvml and the GPU by fakes."""

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        env._nvml.cache_clear()

    yield install
    env._nvml.cache_clear()


@pytest.mark.parametrize(
    ("visible", "fake", "name", "handle", "lookups"),
    [
        # CUDA_VISIBLE_DEVICES=3: device 0 of CUDA is device 3 of NVML
        ("3", nvml(HANDLES), "cuda:0", "gpu", 1),
        ("3", nvml(HANDLES), "cuda", "gpu", 1),
        ("MIG-abc", nvml({"MIG-abc": "slice", **HANDLES}), "cuda:0", "slice", 1),
        ("", nvml({f"MIG-{UUID}": "slice"}), "cuda:0", "slice", 2),
    ],
    ids=["UUID", "current", "MIG by name", "MIG"],
)
def test_gpu_is_found_by_what_cuda_says_it_is(
    install, monkeypatch, visible, fake, name, handle, lookups
):
    install(fake)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert env.nvml_handle(name) == handle
    assert fake.nvmlDeviceGetHandleByUUID.call_count == lookups


@pytest.mark.parametrize(
    ("fake", "driver"),
    [(None, None), (nvml(loads=False), None), (nvml(), "580.65")],
    ids=["no package", "no driver", "no GPU"],
)
def test_without_nvml_everything_else_is_described(install, fake, driver):
    install(fake)
    assert env.nvml_handle("cuda:0") is None
    assert env.device_used_bytes(None) is None
    gpu = env.describe("cuda:0")["device"]
    assert (gpu["name"], gpu["power_limit_w"], gpu["driver"]) == (PROPERTIES.name, None, driver)


def test_gpu_is_described_and_its_used_memory_is_bytes(install):
    install(nvml(by_uuid=HANDLES))
    assert env.device_used_bytes("gpu") == 662 * 2**20
    assert env.device_used_bytes("an unknown handle") is None
    assert env.describe("cuda")["device"] == {
        "type": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81920.0,
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "power_limit_w": 700.0,
        "driver": "580.65",
    }


def test_description_is_complete_json_without_paths_names_or_a_call_of_cuda(monkeypatch):
    for name in ("cuda._lazy_init", "_C._cuda_init", "cuda.get_device_properties"):
        monkeypatch.setattr(f"torch.{name}", None, raising=False)
    described = env.describe()
    text = json.dumps(described)
    assert json.loads(text) == described
    assert described["device"] == env.describe("cpu")["device"] == {"type": "cpu"}
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
    assert re.fullmatch(r"[0-9a-f]{40}", env._git_state(root)["commit"])
    (root / "notes.txt").write_text("a record must not make the checkout dirty")
    assert env._git_state(root)["dirty"] is False
    (code / "b.py").write_text("2")
    assert env._git_state(root)["dirty"] is True
    (code / "b.py").unlink()
    (code / "a.py").write_text("3")
    assert env._git_state(root)["dirty"] is True
    assert env._git_state(tmp_path) is env._git_state(code) is None  # no checkout, another's
    monkeypatch.setenv("PATH", "")
    assert env._git_state(root) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu0", "expected a device such as cpu or cuda:0, got 'gpu0'"),
        ("meta", "a device that computes, .* got 'meta'"),
        ("cuda:99", "got 'cuda:99', but PyTorch sees"),
        ("mps", r"expected a device of this machine, got 'mps' \(.{1,150}\): use cpu or cuda$"),
        ("privateuseone", "expected a device of this machine, got 'privateuseone'"),
    ],
)
def test_devices_that_are_not_there_are_refused(name, message):
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == name:
        pytest.skip(f"{name} is there")
    with pytest.raises(InputError, match=message):
        env.usable_device(name)


def test_auto_is_chosen_for_the_user_and_what_no_clock_can_time_is_refused(monkeypatch):
    assert env.device_or_default("cuda:1") == "cuda:1"
    assert env.device_or_default("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert env.timed_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(env, "usable_device", torch.device)
    with pytest.raises(InputError, match="expected a device that can be timed, cpu or cuda"):
        env.timed_device("mps")


@pytest.mark.gpu
def test_nvml_reads_the_gpu_that_cuda_uses():
    handle = env.nvml_handle("cuda")
    if handle is None:
        pytest.skip("NVML does not know this GPU")
    before = env.device_used_bytes(handle)
    block = torch.zeros(2**30 // 4, device="cuda")
    assert env.device_used_bytes(handle) - before > 2**29
    del block
