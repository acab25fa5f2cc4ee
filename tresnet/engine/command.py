"""The command lines of train.py and eval.py: options from the dataclasses, errors in one line."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tresnet.engine import batch_size, evaluate_weights, rundir
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.engine.recipes import recipe
from tresnet.engine.resolve import resolve
from tresnet.engine.train import train
from tresnet.engine.validate import validate
from tresnet.errors import TResNetError

BAD_INPUT = 2


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train a TResNet on a folder of images, or on the digits: --data digits --recipe digits."""

    config: TrainConfig
    resume: Path | None = None
    """Go on with the run in this directory, from its last checkpoint."""
    dry_run: bool = False
    """Print the configuration as it would be used, and do nothing else."""


def train_main(arguments: Sequence[str] | None = None) -> int:
    """Run train.py; returns the exit code."""
    return _guard(lambda: _train(sys.argv[1:] if arguments is None else arguments))


def eval_main(arguments: Sequence[str] | None = None) -> int:
    """Run eval.py; returns the exit code."""
    return _guard(lambda: _evaluate(sys.argv[1:] if arguments is None else arguments))


def parse_train(arguments: Sequence[str]) -> TrainCommand:
    """Options over the defaults of the recipe they name, or of the run they resume.

    Raises:
        ConfigError: The recipe is unknown, or the run has no readable configuration.
        SystemExit: Help was asked for (0), or an option is unknown or malformed (2).
    """
    import tyro

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--recipe")
    early.add_argument("--resume", type=Path)
    named, _ = early.parse_known_args(arguments)
    if named.recipe is None and named.resume is not None:
        defaults = configs.load(named.resume / rundir.CONFIG)
    else:
        defaults = recipe(named.recipe or "paper")
    return tyro.cli(
        TrainCommand,
        prog="train.py",
        args=list(arguments),
        default=TrainCommand(defaults),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _train(arguments: Sequence[str]) -> int:
    command = parse_train(arguments)
    if command.dry_run:
        validate(command.config)
        config = resolve(command.config)
        if command.resume is not None:
            config = configs.resumed(configs.load(command.resume / rundir.CONFIG), config)
        config = batch_size.foresee(config, lambda line: sys.stderr.write(f"{line}\n"))
        sys.stdout.write(configs.to_json(config))
        return 0
    result = train(command.config, command.resume)
    return 128 + result.stopped_by if result.stopped_by else 0


def _evaluate(arguments: Sequence[str]) -> int:
    import tyro

    config = tyro.cli(
        EvalConfig,
        prog="eval.py",
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    evaluate_weights.run(config)
    return 0


def _guard(action: Callable[[], int]) -> int:
    """Turn the errors that a user can cause into one message on stderr and an exit code."""
    try:
        return action()
    except TResNetError as error:
        rank = os.environ.get("RANK", "0")
        sys.stderr.write(f"error: {'' if rank == '0' else f'process {rank}: '}{error}\n")
        return BAD_INPUT
    except torch.OutOfMemoryError as error:
        sys.stderr.write(
            f"error: the GPU's memory is full: {error}\nTry a smaller --batch-size (with a larger"
            " --accumulate the updates stay the same), --amp bf16 or --grad-checkpointing\n"
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("stopped at once\n")
        return 130
