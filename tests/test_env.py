import getpass
import json
import re
import socket
import subprocess
import sys
import types
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tresnet import env
from tresnet.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """Stands in for pynvml: GPUs by UUID and PCI address, a log of what was asked."""

    def __init__(self, by_uuid=None, by_address=None, loads=True):
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.by_uuid, self.by_address, self.loads = by_uuid or {}, by_address or {}, loads
        self.asked = []

    def nvmlInit(self):  # noqa: N802
        if not self.loads:
            raise NVMLError("library not found")

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked.append(uuid)
        return self._find(self.by_uuid, uuid)

    def nvmlDeviceGetHandleByPciBusId(self, address):  # noqa: N802
        self.asked.append(address)
        return self._find(self.by_address, address)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(used=self._find({"gpu": 662 * 2**20}, handle))

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"580.65"

    def nvmlDeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        return self._find({"gpu": 700_000}, handle)

    def _find(self, table, key):
        if key not in table:
            raise NVMLError("not found")
        return table[key]


PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 * 2**30,
    major=9,
    minor=0,
    multi_processor_count=132,
    uuid="11111111-2222-3333-4444-555555555555",
    pci_domain_id=0,
    pci_bus_id=0x1A,
    pci_device_id=0,
)


@pytest.fixture
def install(monkeypatch):
    """Put a fake pynvml and a fake GPU in place of the real ones."""

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        env._nvml.cache_clear()

    yield install
    env._nvml.cache_clear()


def test_gpu_is_found_by_what_cuda_says_its_uuid_is(install, monkeypatch):
    """CUDA's device 0 under CUDA_VISIBLE_DEVICES=3 is not NVML's device 0."""
    fake = FakeNvml(by_uuid={f"GPU-{PROPERTIES.uuid}": "gpu"})
    install(fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert env.nvml_handle("cuda:0") == "gpu"
    assert env.nvml_handle("cuda") == "gpu"
    assert set(fake.asked) == {f"GPU-{PROPERTIES.uuid}"}


def test_mig_slice_is_found_by_its_name_in_cuda_visible_devices(install, monkeypatch):
    fake = FakeNvml(by_uuid={"MIG-abc": "slice", f"GPU-{PROPERTIES.uuid}": "whole"})
    install(fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc")
    assert env.nvml_handle("cuda:0") == "slice"


def test_pci_address_is_asked_where_nvml_does_not_know_the_uuid(install):
    fake = FakeNvml(by_address={"00000000:1a:00.0": "gpu"})
    install(fake)
    assert env.nvml_handle("cuda:0") == "gpu"
    assert len(fake.asked) == 3


def test_used_memory_is_bytes_or_none(install):
    install(FakeNvml(by_uuid={f"GPU-{PROPERTIES.uuid}": "gpu"}))
    assert env.device_used_bytes("gpu") == 662 * 2**20
    assert env.device_used_bytes("a device that does not tell") is None
    install(FakeNvml())
    assert env.nvml_handle("cuda:0") is None
    assert env.device_used_bytes(None) is None


@pytest.mark.parametrize("fake", [None, FakeNvml(loads=False)], ids=["no package", "no driver"])
def test_without_nvml_everything_else_is_described(install, fake):
    install(fake)
    assert env.nvml_handle("cuda:0") is None
    gpu = env.describe("cuda:0")["device"]
    assert gpu["name"] == PROPERTIES.name
    assert gpu["power_limit_w"] is None
    assert gpu["driver"] is None


def test_gpu_is_described(install):
    install(FakeNvml(by_uuid={f"GPU-{PROPERTIES.uuid}": "gpu"}))
    assert env.describe("cuda")["device"] == {
        "type": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81920.0,
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "power_limit_w": 700.0,
        "driver": "580.65",
    }


def test_description_is_json_and_complete():
    described = env.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["device"] == {"type": "cpu"}
    assert datetime.fromisoformat(described["date_utc"]).utcoffset().total_seconds() == 0
    assert described["python"].count(".") == 2
    assert described["cpu"]["torch_threads"] == torch.get_num_threads()
    assert described["cpu"]["logical_cores"] >= 1
    assert described["packages"]["torch"].startswith("2.")
    assert set(described["packages"]) >= {"torchvision", "timm", "triton", "inplace-abn"}


def test_no_path_host_or_user_is_described():
    text = json.dumps(env.describe())
    assert str(ROOT) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    for private in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf'"{re.escape(private)}[".]', text)


def test_describing_the_cpu_leaves_cuda_alone(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("CUDA was touched")

    for name in ("cuda._lazy_init", "_C._cuda_init", "cuda.get_device_properties"):
        monkeypatch.setattr(f"torch.{name}", refuse, raising=False)
    assert env.describe()["device"] == env.describe("cpu")["device"]


def git(folder, *arguments):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


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
    (checkout / "notes.txt").write_text("not code")  # a new record must not make the next dirty
    assert env._git_state(checkout)["dirty"] is False
    (checkout / "tresnet" / "b.py").write_text("2")
    assert env._git_state(checkout)["dirty"] is True
    (checkout / "tresnet" / "b.py").unlink()
    (checkout / "tresnet" / "a.py").write_text("3")
    assert env._git_state(checkout)["dirty"] is True


def test_no_checkout_and_inside_somebody_elses_is_none(checkout):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert env._git_state(installed) is None
    assert env._git_state(checkout.parent) is None


def test_without_git_is_none(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert env._git_state(checkout) is None


def test_version_is_that_of_the_checkout_or_as_installed(tmp_path, monkeypatch):
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", env.package_version())
    monkeypatch.setattr(env, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(env, "_installed_version", lambda name: f"{name} 9")
    assert env.package_version() == "tresnet 9"


def test_usable_devices():
    assert env.usable_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="expected a device such as cpu or cuda:0, got 'gpu0'"):
        env.usable_device("gpu0")
    with pytest.raises(InputError, match=r"a device that computes, .* got 'meta'"):
        env.usable_device("meta")
    with pytest.raises(InputError, match="got 'cuda:99', but PyTorch sees"):
        env.usable_device("cuda:99")


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu", "privateuseone"])
def test_devices_of_other_makes_that_are_not_there(name):
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == name:
        pytest.skip(f"{name} is there")
    with pytest.raises(InputError, match=f"expected a device of this machine, got '{name}'"):
        env.usable_device(name)


def test_what_no_clock_can_time_is_refused(monkeypatch):
    assert env.timed_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(env, "usable_device", torch.device)
    with pytest.raises(InputError, match="expected a device that can be timed, cpu or cuda"):
        env.timed_device("mps")


def test_only_an_absent_device_is_chosen_for_the_user():
    assert env.device_or_default("cuda:1") == "cuda:1"
    assert env.device_or_default("") == ""
    assert env.device_or_default(None) == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_nvml_reads_the_gpu_that_cuda_uses():
    handle = env.nvml_handle("cuda")
    if handle is None:
        pytest.skip("NVML does not know this GPU")
    before = env.device_used_bytes(handle)
    block = torch.zeros(2**30 // 4, device="cuda")
    assert env.device_used_bytes(handle) - before > 2**29
    del block
