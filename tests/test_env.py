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


def test_used_memory_is_bytes_or_none(install):
    install(nvml(by_uuid=HANDLES))
    assert env.device_used_bytes("gpu") == 662 * 2**20
    assert env.device_used_bytes("an unknown handle") is None
    install(nvml())
    assert env.nvml_handle("cuda:0") is None
    assert env.device_used_bytes(None) is None


@pytest.mark.parametrize("fake", [None, nvml(loads=False)], ids=["no package", "no driver"])
def test_without_nvml_everything_else_is_described(install, fake):
    install(fake)
    assert env.nvml_handle("cuda:0") is None
    gpu = env.describe("cuda:0")["device"]
    assert gpu["name"] == PROPERTIES.name
    assert gpu["power_limit_w"] is None
    assert gpu["driver"] is None


def test_gpu_is_described(install):
    install(nvml(by_uuid=HANDLES))
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


def git(folder, *arguments):
    user = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *user, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    (folder / "tresnet").mkdir(parents=True)
    (folder / "tresnet" / "a.py").write_text("1")
    git(tmp_path, "init", "checkout")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def test_commit_and_dirty_flag(checkout):
    state = env._git_state(checkout)
    assert re.fullmatch(r"[0-9a-f]{40}", state["commit"])
    assert state["dirty"] is False
    (checkout / "notes.txt").write_text("not code")  # a record must not make the checkout dirty
    assert env._git_state(checkout)["dirty"] is False
    (checkout / "tresnet" / "b.py").write_text("2")
    assert env._git_state(checkout)["dirty"] is True
    (checkout / "tresnet" / "b.py").unlink()
    (checkout / "tresnet" / "a.py").write_text("3")
    assert env._git_state(checkout)["dirty"] is True


def test_no_checkout_somebody_elses_and_no_git_are_none(checkout, monkeypatch):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert env._git_state(installed) is None
    assert env._git_state(checkout.parent) is None
    monkeypatch.setenv("PATH", "")
    assert env._git_state(checkout) is None


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


def test_what_no_clock_can_time_is_refused(monkeypatch):
    assert env.timed_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(env, "usable_device", torch.device)
    with pytest.raises(InputError, match="expected a device that can be timed, cpu or cuda"):
        env.timed_device("mps")


def test_only_an_absent_device_is_chosen_for_the_user():
    assert env.device_or_default("cuda:1") == "cuda:1"
    assert env.device_or_default("") == ""
    assert env.device_or_default("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_nvml_reads_the_gpu_that_cuda_uses():
    handle = env.nvml_handle("cuda")
    if handle is None:
        pytest.skip("NVML does not know this GPU")
    before = env.device_used_bytes(handle)
    block = torch.zeros(2**30 // 4, device="cuda")
    assert env.device_used_bytes(handle) - before > 2**29
    del block
