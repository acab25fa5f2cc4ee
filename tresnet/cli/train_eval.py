"""Parse the command lines of train.py and eval.py into configurations, and run them."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from tresnet.cli.output import PARTLY_FAILED_EXIT_CODE, format_table, say
from tresnet.cli.timm_options import refuse_timm_options
from tresnet.engine import config as configs
from tresnet.engine import evaluate_weights, rundir
from tresnet.engine.config import AUTO, TrainConfig
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.engine.recipes import recipe
from tresnet.engine.train import dry_run, train
from tresnet.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train a TResNet on a folder of images, or on handwritten digits with --recipe digits."""

    config: TrainConfig
    resume: Path | None = None
    """Directory of a run to continue from its last checkpoint. auto: continue the run that
    --name names, or begin it if it does not exist. auto suits jobs that a scheduler restarts."""
    base: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Path of another run's config.json, which gives the defaults in place of a recipe."""
    new_head: bool = False
    """Begin with a new classifier even if --weights has the data's classes. Other classes always
    have a new one, and a resumed run keeps its own."""
    dry_run: bool = False
    """Prepare the run up to its first batch, print the complete configuration and exit. No run
    directory is made."""


def train_command(arguments: Sequence[str], prog: str = "train.py") -> int:
    """Train with these arguments; return the exit code. `prog` is the program's name in help."""
    command = parse_train(arguments, prog)
    if command.dry_run:
        dry_run(command.config, command.resume, command.new_head)
        return 0
    stopped_by = train(command.config, command.resume, command.new_head).stopped_by
    return 128 + stopped_by if stopped_by else 0


def eval_command(arguments: Sequence[str], prog: str = "eval.py") -> int:
    """Evaluate with these arguments; return the exit code. `prog` is the program's name in help."""
    refuse_timm_options(arguments, own=["--output"])
    omit = (tyro.conf.OmitArgPrefixes,)
    config = tyro.cli(EvalConfig, prog=prog, args=list(arguments), config=omit)
    if isinstance(config.weights, str):
        evaluate_weights.run(config)
        return 0
    complete = evaluate_weights.compare(config, lambda *table: say(format_table(*table)))
    return 0 if complete else PARTLY_FAILED_EXIT_CODE


def parse_train(arguments: Sequence[str], prog: str = "train.py") -> TrainCommand:
    """Parse the options; the defaults come from --recipe, --config or the run to resume."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--recipe")
    early.add_argument("--resume", type=Path)
    early.add_argument("--config", type=Path)
    refuse_timm_options(arguments)
    named, _ = early.parse_known_args(arguments)
    if named.config is not None:
        if named.recipe is not None or named.resume is not None:
            raise ConfigError("--config: expected no --recipe and no --resume beside it")
        defaults = configs.replace(configs.load(named.config), name=None)
    elif named.resume is not None and str(named.resume) != AUTO:
        rundir.check_directory(named.resume)
        try:
            defaults = configs.load(named.resume / rundir.CONFIG)
        except ConfigError:
            if named.recipe is None:
                raise
            defaults = recipe(named.recipe)
    else:
        defaults = recipe(named.recipe or "paper")
    return tyro.cli(
        TrainCommand,
        prog=prog,
        args=list(arguments),
        default=TrainCommand(defaults),
        config=(tyro.conf.OmitArgPrefixes,),
    )
