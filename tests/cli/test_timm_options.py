import dataclasses
import re
from pathlib import Path

from tresnet.cli.timm_options import TIMM_OPTIONS
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.settings import InferenceCompute
from tresnet.settings.fields import option

OWN = {*map(option, configs.flatten(TrainConfig())), "--resume", "--dry-run", "--config"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_every_name_is_timms_alone_or_ours_and_in_the_table():
    assert not TIMM_OPTIONS.keys() & OWN
    evaluation = (*dataclasses.fields(EvalConfig), *dataclasses.fields(InferenceCompute))
    assert TIMM_OPTIONS.keys() & {option(field.name) for field in evaluation} == {"--output"}
    named = {words.split()[0].rstrip(",") for words in TIMM_OPTIONS.values()}
    assert named <= OWN | {"--output", "--only-data-classes"}
    section = PAGE.read_text(encoding="utf-8").partition("## Coming from timm's train.py")[2]
    rows = re.findall(r"^\| (.+?) \| (?!none).+ \|$", section.partition("\n## ")[0], re.MULTILINE)
    in_table = set(re.findall(r"--[a-z][a-z-]+", " ".join(rows)))
    assert {"--aa", "--smoothing", "--drop-path"} <= in_table
    assert in_table <= TIMM_OPTIONS.keys() | OWN
    assert TIMM_OPTIONS.keys() - in_table <= {
        *("-b", "-j", "--data-dir", "--dataset", "--kd-model-name", "--wandb-project"),
        *("--checkpoint", "--results-file", "--valid-labels"),
    }
