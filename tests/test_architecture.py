"""Check rules of the source tree: which modules may import which, and how files are read."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("tresnet/**/*.py"), *ROOT.glob("*.py")])
LINT = (
    "from importlinter.cli import lint_imports_command as main; main(['--no-cache', '--no-logo'])"
)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the package in `root` against the import contracts of `root`/pyproject.toml."""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, '.'); {LINT}"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def test_imports_point_down():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_broken_import_rules_are_found(tmp_path: Path):
    shutil.copytree(
        ROOT / "tresnet", tmp_path / "tresnet", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in (
        ("models/probe.py", "import tresnet.engine.config"),
        ("data/probe.py", "import tresnet.measure"),
        ("cli/probe.py", "def late():\n    import triton"),
        ("ops/epilogue/definition.py", "import tresnet.ops.epilogue.passes"),
    ):
        with (tmp_path / "tresnet" / module).open("a") as file:
            file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    report = " ".join(result.stdout.split())
    for contract in ("layers point down", "imports triton", "definition stands alone"):
        assert f"{contract} BROKEN" in report
    for edge in ("models.probe -> tresnet.engine.config", "data.probe -> tresnet.measure"):
        assert f"tresnet.{edge}" in report


def test_no_module_is_hidden_by_a_function_of_its_name():
    """Import all modules except timm_plugin, which changes timm when it is imported."""
    for package, name in [
        (".".join(path.relative_to(ROOT).parent.parts), path.stem)
        for path in SOURCES
        if len(path.relative_to(ROOT).parts) > 1
        and path.stem not in ("__init__", "kernels", "timm_plugin")
    ]:
        module = importlib.import_module(f"{package}.{name}")
        assert getattr(importlib.import_module(package), name) is module


def test_weights_are_read_strictly_and_safely():
    unsafe = (
        r"torch\.load\((?!.*weights_only=True)",
        r"load_state_dict\(.*(strict=|, *False)",
        r"\b(pickle|joblib|dill|cloudpickle)\.(load|loads|Unpickler)\b",
    )
    for path in SOURCES:
        assert re.findall("|".join(unsafe), path.read_text()) == [], path


# Paths of this machine and addresses of package registries; `REGISTRY` does not match itself.
HERE = [f"{folder}/" for folder in (ROOT, Path.home()) if folder != Path("/")]
REGISTRY = r"https?://[\w.-]*(?:p[y]pi|h[o]sted|n[p]mjs|d[e]bian)"
LOCAL = re.compile("|".join([REGISTRY, *map(re.escape, HERE)]))


def test_no_file_names_this_machine_or_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: the committed files are not known")
    matches = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text().splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        matches += [f"{name}:{i}: {line}" for i, line in enumerate(lines, 1) if LOCAL.search(line)]
    assert matches == []
