"""Check README.md and docs/: Python code runs, commands parse, links and figures are right."""

import ast
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from glob import glob
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
import yaml
from torch.distributed.launcher.api import LaunchConfig

from tests.forks import run_forked
from tresnet.checkpoints.locate import entries
from tresnet.cli.bench import _STEP_TABLE
from tresnet.cli.commands import parse
from tresnet.cli.main import main as tresnet_main
from tresnet.cli.train_eval import parse_train
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.engine.logs import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.md"))
TRAINERS = ROOT / "docs" / "trainers.md"  # run by tests/trainers
GOLDEN = json.loads((ROOT / "tests" / "golden" / "zoo.json").read_text())
PYTHON = (ROOT / "docs" / "reference" / "python.md").read_text()
ALONE = """
import json, multiprocessing, sys, traceback
import pydantic, timm, torchvision

def failed(code):
    try:
        exec(code, {"__name__": "__main__"})
    except Exception:
        return traceback.format_exc() + code

code = json.load(sys.stdin)
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    errors = dict(zip(code, pool.map(failed, code, 1)))
json.dump(errors, open(sys.argv[1], "w"))
"""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # read by torchrun
# Comments above code blocks that cannot run here.
ELSEWHERE = "needs a download", "needs files of your own", "at an earlier commit"
# Beginnings of other commands that pages may show.
OTHERS = (
    *("pip install", "python3 benchmarks/gpu.py", "python3 -m venv", ". .venv", "pytest"),
    *("sphinx-build", "ruff", "pyright", "lint-imports"),
)


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language, except those below a comment of `ELSEWHERE`."""
    pairs = re.findall(rf"(?m)(^.*\n)```{language}\n((?:(?!```).*\n)*)```", text)
    return [code for before, code in pairs if before[5:-5] not in ELSEWHERE]


def command_lines() -> list[tuple[Path, str]]:
    return [
        (page, line.strip())
        for page in PAGES
        for block in blocks(page.read_text(), "bash")
        for line in block.replace("&&", "\n").replace("\\\n", " ").splitlines()
        if line.strip()
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str | None], Path]:
    """Errors of blocks and names, each run in a fork of a process without tresnet; its folder."""
    pages = [page for page in PAGES if page not in (*EXAMPLES, TRAINERS)]
    code = [code for page in pages for code in blocks(page.read_text(), "python")]
    code += [f"import tresnet; {name}" for name in public_names()]
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "errors.json"], input=json.dumps(code), cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "errors.json").read_text()), folder


def public_names() -> list[str]:
    """Return the package's names in the reference and in the text of all pages."""
    text = "\n".join(page.read_text() for page in PAGES)
    prose = re.sub(r"(?ms)^```(?:python|bash)$.*?^```$|`(?:import|python -m) .*?`", "", text)
    pattern = r"(?m)^(tresnet\.[\w.]+)\(|:: (tresnet\S+)|`(tresnet(?:\.[a-z]\w+)+)"
    return sorted(set(map("".join, re.findall(pattern, prose))))


def test_python_blocks_can_be_copied_one_by_one_and_public_names_are_attributes(alone):
    errors, folder = alone
    assert {"tresnet.create", "tresnet.fused.implementation"} <= {*public_names()}
    assert not any(errors.values()), "\n".join(filter(None, errors.values()))
    assert (folder / "mine.pth").is_file()


def test_a_detector_trains_all_but_its_frozen_stages():
    scope: dict[str, Any] = {}
    code = blocks((ROOT / "docs" / "models.md").read_text(), "python")
    exec(next(block for block in code if "FasterRCNN" in block), scope)
    detector = scope["detector"].train()
    before = {name: value.clone() for name, value in detector.backbone.state_dict().items()}
    boxes = torch.tensor([[8.0, 8.0, 48.0, 48.0]])
    detector.transform.min_size = (64,)
    losses = detector(
        [torch.rand(3, 64, 64)] * 2, [{"boxes": boxes, "labels": torch.ones(1).long()}] * 2
    )
    torch.stack(list(losses.values())).sum().backward()
    scope["optimizer"].step()
    changed = {
        ".".join(name.split(".")[:4])
        for name, value in detector.backbone.state_dict().items()
        if not torch.equal(value, before[name]) and "body" in name
    }
    assert changed == {f"backbone.model.body.layer{stage}" for stage in (3, 4)}
    sizes = [level.shape[-1] for level in scope["backbone"](torch.rand(1, 3, 64, 64))]
    assert sizes == [64 // stride for stride in (8, 16, 32)]


@pytest.mark.slow
def test_python_blocks_of_the_examples_run(tmp_path: Path):
    """Run all blocks in one process, because they build on each other."""
    code = "\n".join(code for page in EXAMPLES for code in blocks(page.read_text(), "python"))
    result = run_forked(exec, code, {"__name__": "__main__"}, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "photographs.onnx").is_file()


@pytest.mark.parametrize(("page", "line"), command_lines(), ids=lambda part: str(part)[-60:])
def test_a_command_line_parses(page: Path, line: str):
    words = shlex.split(line, comments=True)
    if "train.py" in words:
        arguments = words[words.index("train.py") + 1 :]
        if "--resume" not in words or "auto" in words:
            assert parse_train(arguments).config.data.data
    elif "eval.py" in words:
        arguments = words[words.index("eval.py") + 1 :]
        config = (tyro.conf.OmitArgPrefixes,)
        assert tyro.cli(EvalConfig, args=arguments, config=config).weights
    elif words[0] == "tresnet":
        assert parse(words[1:]).keywords
    elif words[:1] == ["python"]:
        assert words[1] == "-m" or (ROOT / words[1]).is_file()
    else:
        assert line.removeprefix("OMP_NUM_THREADS=2 ").startswith(OTHERS), f"{page}: {line}"


# Pages whose first commands install, test, or belong to an earlier commit.
WITHOUT_OUTPUT = ("CONTRIBUTING.md", "inplace-abn.md", "abn-or-inverting.md")
FIRST = {page.name: page for page in PAGES if "\n```bash\n" in page.read_text()}


def first_command(page: Path) -> tuple[str, list[str]]:
    """Return a page's first block of commands, and the lines of the block after it, up to "..."."""
    command, between, language, output = re.findall(
        r"(?ms)^```bash\n(.*?)^```\n(.*?)^```(\w*)\n(.*?)^```$", page.read_text()
    )[0]
    assert language == "", "the block after the first command is what it prints"
    assert len(between.split("\n\n")) <= 2, "nothing but a sentence is between them"
    return command, output.splitlines()


def assert_printed(lines: list[str], printed: list[str]) -> None:
    """Compare the first lines, in which "..." stands for any text."""
    shown = lines[: lines.index("...")] if "..." in lines else lines
    assert shown
    for line, actual in zip(shown, printed, strict=False):
        pattern = re.escape(line).replace(re.escape("..."), ".+?")
        assert re.fullmatch(pattern, actual.rstrip()), f"{line!r} is {actual!r}"
    assert len(printed) >= len(shown)


@pytest.mark.parametrize("name", sorted(FIRST.keys() - {*WITHOUT_OUTPUT}))
def test_the_first_command_is_followed_by_what_a_run_prints(name: str):
    """The figures of a run's lines are columns of the log, in its words and units."""
    _, lines = first_command(FIRST[name])
    number = r"(?:\.\.\.|[\d.e-]+)"
    texts = [text for text in COLUMNS.values() if text] + ["{} MiB"]
    patterns = [number.join(map(re.escape, re.split(r"\{.*?\}", text))) for text in texts]
    for line in lines:
        if line.startswith("epoch "):
            first, *fields = re.split("  +", line)
            assert re.fullmatch(r"epoch \d+/\d+", first)
            assert fields[-1].endswith(" MiB")
            for field in fields:
                assert any(re.fullmatch(pattern, field) for pattern in patterns), field


OUTPUTS = ("predicting.md", "exporting.md", "memory.md", "weights.md")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").symlink_to(digits_folder.parent)
    return folder


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_first_command_prints_what_the_page_shows(name, place, monkeypatch, capsys):
    command, lines = first_command(FIRST[name])
    line = next(line for line in command.splitlines() if line.startswith("tresnet "))
    monkeypatch.chdir(place)
    words = [w for word in shlex.split(line)[1:] for w in sorted(glob(word)) or [word]]
    assert tresnet_main(words) == 0
    assert_printed(lines, capsys.readouterr().out.splitlines())


def test_the_table_of_benchmarks_has_the_columns_that_the_page_shows():
    _, lines = first_command(FIRST["benchmarks.md"])
    assert re.split("  +", lines[0]) == ["case", *(title for title, *_ in _STEP_TABLE), "status"]


def test_files_for_clusters_are_sound(monkeypatch):
    folder = ROOT / "docs" / "clusters"
    _, job = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    subprocess.run(["bash", "-n", folder / "slurm.sbatch"], check=True)
    slurm = (folder / "slurm.sbatch").read_text().replace("\\\n", " ")
    (line,) = (line for line in slurm.splitlines() if "torchrun" in line and "srun" in line)
    for words in (container["args"], shlex.split(line.rstrip(" &"))):
        command = parse_train(words[words.index("train.py") + 1 :])
        assert str(command.resume) == "auto"
        assert command.config.run.name
    (signal_s,) = re.findall(r"--signal=B:USR1@(\d+)", slurm)
    (slurm_timeout_s,) = re.findall(rf"export {SHUTDOWN_TIMEOUT}=(\d+)", slurm)
    (variable,) = container["env"]
    assert variable["name"] == SHUTDOWN_TIMEOUT
    for timeout_s, limit_s in (
        (slurm_timeout_s, int(signal_s)),
        (variable["value"], pod["terminationGracePeriodSeconds"]),
    ):
        monkeypatch.setenv(SHUTDOWN_TIMEOUT, timeout_s)
        torchrun = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
        assert limit_s - 30 <= torchrun.shutdown_timeout < limit_s


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_records_are_there(page: Path):
    text = page.read_text()
    for link in re.findall(r"(?:\]\(|src=\"|srcset=\")([^\")#]+)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    folders = r"(?<![\w./-])(?:benchmarks|docs|tests|tresnet|weights)/[\w./-]*\w"
    for path in {*re.findall(folders, text)} - {"tests/golden/NAME.json"}:
        assert "..." in path or (ROOT / path).exists(), path


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in shown}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_are_headings_of_their_page(page: Path):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        target = page.parent / link if link else page
        assert link.startswith("http") or anchor in anchors(target), f"{link}#{anchor}"


def rows(page: str, *header: str) -> list[list[str]]:
    """Return the cells of the page's table whose header begins with these titles."""
    text = (ROOT / page).read_text()
    start = text.index(f"| {' | '.join(header)} |")
    lines = text[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_model_table_holds_the_golden_figures():
    table = {row[0]: row[1:4] for row in rows("README.md", "model", "parameters")}
    assert table.keys() == GOLDEN.keys()
    for name, golden in GOLDEN.items():
        parameters, gmacs, pixels = table[name]
        assert (parameters, pixels) == (f"{golden['parameters']:,}", str(golden["pixels"])), name
        digits = len(gmacs.partition(".")[2])
        assert gmacs == f"{golden['macs'] / 1e9:.{digits}f}", name


def test_accuracies_and_licences_are_the_manifests():
    table = rows("docs/weights.md", "weights", "input")
    quoted = {row[0]: [float(cell) for cell in row[1:]] for row in table}
    manifest = {
        tag: [entry.input_size[-1], entry.top1, entry.top5]
        for tag, entry in entries().items()
        if entry.accuracy_source and "results-imagenet.csv" in entry.accuracy_source
    }
    assert quoted == manifest
    assert {entry.license for entry in entries().values()} == {"apache-2.0"}
    assert "the licence of each: Apache-2.0" in (ROOT / "docs" / "weights.md").read_text()


def test_columns_of_the_log_are_those_of_the_page():
    cells = " ".join(row[0] for row in rows("docs/training.md", "columns of the log", "hold"))
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(COLUMNS)


def test_signatures_are_those_of_the_functions():
    signatures = re.findall(r"(?m)^(tresnet\.[\w.]+)(\(.*\))$", PYTHON)
    assert signatures
    for name, signature in signatures:
        parameters = inspect.signature(pkgutil.resolve_name(name)).parameters.values()
        bare = [one.replace(annotation=one.empty, default=one.empty) for one in parameters]
        assert signature == str(inspect.Signature(bare)), name


def test_quoted_errors_are_those_of_the_package():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tresnet").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = "\n".join(node.value for node in nodes if isinstance(node.value, str))
    for message, _ in rows("docs/errors.md", "message", "cause and remedy"):
        for part in message.strip("`").split("..."):
            assert part.strip() in texts, message


def test_the_page_of_options_is_current():
    """Update the page by `python docs/commands.py > docs/reference/commands.md`."""
    if f"tyro=={version('tyro')}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("another tyro prints another help")
    command = [sys.executable, "docs/commands.py"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == (ROOT / "docs" / "reference" / "commands.md").read_text()


def test_github_renders_all_directives():
    """Allow eval-rst too, because docs/reference/python.md also has its signatures as text."""
    directives = {name for page in PAGES for name in re.findall(r"```\{(\S+)\}", page.read_text())}
    assert directives <= {"eval-rst", "toctree"}


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path):
    pytest.importorskip("furo", reason="pip install -e '.[docs]'")
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "tresnet.create" in (tmp_path / "reference" / "python.html").read_text()
    page = (tmp_path / "kernels.html").read_text()  # whose style sheet keeps options on one line
    assert "_static/site.css" in page
    assert '<span class="pre">--cuda-graph</span>' in page
    assert "nowrap" in (tmp_path / "_static" / "site.css").read_text()
