"""Cores of the affinity and the cgroup, and the OpenMP variables that commands set."""

import os
import subprocess
import sys

import pytest

from tresnet import cores

VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),  # 1.5 cores
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),  # more than the machine has
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "\n"}, 8),
    ],
)
def test_usable_cores_are_those_of_the_cgroup(files, usable, tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores.usable_cores() == usable


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7"}),
        (
            {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"},
            {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"},
        ),
    ],
)
def test_what_a_user_left_open_is_set(given, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("1000 100000\n")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "environ", given.copy())
    cores.share()
    assert os.environ == expected


def test_commands_do_so_before_torch_is_imported():
    code = """
import os, sys
from tresnet import cores
from tresnet.cli import shell
cores.usable_cores, cores._visible_cores = lambda: 1, lambda: 8
shell.run(lambda: 0)
assert "torch" not in sys.modules
import torch
print(torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"])
"""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "1 1000\n")
