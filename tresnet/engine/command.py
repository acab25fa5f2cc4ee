"""The command lines of train.py and eval.py: options from the dataclasses, errors in one line."""

import argparse
import dataclasses
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tresnet.engine import batch_size, evaluate_weights, rundir
from tresnet.engine import config as configs
from tresnet.engine.config import AUTO, TrainConfig
from tresnet.engine.console import silence
from tresnet.engine.evaluate_weights import EvalConfig
from tresnet.engine.recipes import recipe
from tresnet.engine.resolve import resolve
from tresnet.engine.train import train
from tresnet.engine.validate import validate
from tresnet.errors import TResNetError, WriteError
from tresnet.files import prepare_streams, redirect

BAD_INPUT = 2


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train a TResNet on a folder of images, or on the digits: --data digits --recipe digits."""

    config: TrainConfig
    resume: Path | None = None
    """Go on with the run in this directory, from its last checkpoint. auto: with the run that
    --name names, or begin it: for jobs that are started again by themselves."""
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
    if named.recipe is None and named.resume is not None and str(named.resume) != AUTO:
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
        if command.resume is not None and str(command.resume) != AUTO:
            saved = configs.load(command.resume / rundir.CONFIG)
            config = configs.resumed(saved, command.config)
        else:
            compute = command.config.compute
            foreseen = torch.cuda.is_available() or compute.gpu_memory is not None
            on_gpu = foreseen if compute.device == "auto" else compute.device != "cpu"
            config = resolve(command.config, on_gpu)
        config = batch_size.foresee(config, _note)
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


def _note(line: str) -> None:
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def _guard(action: Callable[[], int]) -> int:
    """Turn the errors that a user can cause into one message on stderr and an exit code."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as the scripts set it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_streams()
    try:
        return _shown(action)
    except TResNetError as error:
        message, code = str(error), BAD_INPUT
    except torch.OutOfMemoryError as error:
        message, code = (
            (
                f"the GPU's memory is full: {error}\nTry a smaller --batch-size (with a larger"
                " --accumulate the updates stay the same), --amp bf16 or --grad-checkpointing"
            ),
            BAD_INPUT,
        )
    except (RuntimeError, OSError) as error:
        reason = _known(error)
        if reason is None:
            raise
        message, code = reason, 1
    except KeyboardInterrupt:
        _note("stopped at once")
        return 130
    rank = os.environ.get("RANK", "0")
    _note(f"error: {'' if rank == '0' else f'process {rank}: '}{message}")
    return code


def _shown(action: Callable[[], int]) -> int:
    """Do something that prints its result: whoever reads it, such as `head`, may have enough."""
    try:
        try:
            return action()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise  # it is about a file
        redirect(sys.stdout)
        if error.errno == errno.EPIPE:
            return 0
        raise WriteError(f"cannot write to standard output: {error.strerror}") from error


def _known(error: RuntimeError | OSError) -> str | None:
    """What to say of an error that other processes cause; None of any other."""
    text = " ".join(str(error).split())
    if "Too many open files" in text:
        return (
            "the limit of open files of this process is reached: raise it by ulimit -n 4096, or try"
            " fewer --workers; a run goes on from its last checkpoint by --resume"
        )
    if "DataLoader worker (pid" in text:  # "in DataLoader worker" is of an error of the code's own
        return (
            f"a process that loads images has ended: {text}. Try fewer --workers; a run goes on"
            " from its last checkpoint by --resume"
        )
    if isinstance(error, torch.distributed.DistError) or "gloo" in text:
        return f"another process has ended or cannot be reached: {text}"
    return None
