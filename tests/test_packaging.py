"""Check that the wheel holds the package, the committed weights and nothing else."""

import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import hatchling.build
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tresnet

ROOT = Path(__file__).resolve().parents[1]
ROOT_FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
COMMITTED_WEIGHTS = {"manifest.json", "tresnet_t.digits.safetensors"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the sources, and add a downloaded checkpoint, which must not be in the wheel."""
    root = tmp_path_factory.mktemp("tree")
    for name in (*ROOT_FILES, ".gitignore", "train.py", "eval.py"):
        shutil.copy(ROOT / name, root)
    for name in ("tresnet", "weights"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "weights" / "downloaded.safetensors").write_bytes(b"not ours to ship")
    return root


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """Build the wheel without network."""
    out = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tree)
        return out / hatchling.build.build_wheel(str(out))


def test_wheel_holds_every_module_the_committed_weights_licence_and_command(wheel, tree):
    kinds = ("*.py", "*.html")
    files = [path for kind in kinds for path in (tree / "tresnet").rglob(kind)]
    modules = {path.relative_to(tree).as_posix() for path in files}
    weights = {f"tresnet/weights/{name}" for name in COMMITTED_WEIGHTS}
    assert len(modules) > 20
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == modules | weights
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
        assert "tresnet = tresnet.cli.main:main" in commands
        assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()


@pytest.mark.slow
def test_unpacked_wheel_works_away_from_the_sources(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    code = "import sys, tresnet.cli.main as cli; print(cli.__file__); sys.exit(cli.main(['list']))"
    path, *listed = run("-c", code).splitlines()
    assert path == str(site / "tresnet" / "cli" / "main.py")
    assert "tresnet_t.digits" in "".join(listed)
    data = ("--data", "digits", "--recipe", "digits", "--epochs", "1", "--name", "once")
    small = ("--layers", *"1111", "--width-factor", "0.25")
    run("-m", "tresnet.cli.main", "train", *data, *small)
    assert (tmp_path / "runs" / "once" / "best.safetensors").is_file()


def test_sdist_holds_what_a_build_and_a_test_run_need(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tree)
    with tarfile.open(tmp_path / hatchling.build.build_sdist(str(tmp_path))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {*ROOT_FILES, "train.py", "eval.py", "tresnet/__init__.py"} <= names
    assert {name for name in names if name.startswith("weights/")} == {
        f"weights/{name}" for name in COMMITTED_WEIGHTS
    }


def test_the_citation_and_constraints_that_pin_everything_agree_with_the_project():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tresnet.__version__ == project["version"]
    assert f"version: {project['version']}" in (ROOT / "CITATION.cff").read_text().splitlines()
    extras = project["optional-dependencies"]
    del extras["demo"]  # gradio wants an older pillow
    for entry in itertools.chain(project["dependencies"], *extras.values()):
        requirement = Requirement(entry)
        if requirement.name != "tresnet":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, entry


@pytest.mark.slow
def test_dependencies_are_found_for_each_platform():
    """Resolve the dependencies without installing them; nvImageCodec has wheels only for Linux."""
    uv = pytest.importorskip("uv", reason="pip install -e '.[test]'").find_uv_bin()
    options = ["--python-version", "3.12", "--only-binary", ":all:"]
    platforms = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "windows", "macos")
    running = [
        subprocess.Popen(
            [uv, "pip", "compile", *options, "--python-platform", platform, "pyproject.toml"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for platform in platforms
    ]  # fmt: skip
    for platform, process in zip(platforms, running, strict=True):
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert "\ntorch==" in output
        assert ("\nnvidia-nvimgcodec-cu13==" in output) is ("linux" in platform)
