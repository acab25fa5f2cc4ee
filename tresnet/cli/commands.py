"""Parse the command line of `tresnet` into one of its commands."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import DisallowNone, OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from tresnet.cli.bench import Bench
from tresnet.cli.convert_push import Convert, Push
from tresnet.cli.demo import Demo
from tresnet.cli.export import Export
from tresnet.cli.memory import Memory
from tresnet.cli.models import Info, List
from tresnet.cli.predict import Predict
from tresnet.cli.shard import Shard
from tresnet.cli.similar import Similar
from tresnet.cli.split import Split
from tresnet.errors import InputError
from tresnet.settings.fields import Settings, check

_DESCRIPTION = """TResNet image classifiers: models, weights, predictions and measurements.

`tresnet COMMAND --help` explains a command; `tresnet --version` prints the version."""
_TRAIN = "Train a model, with the options of train.py."
_EVAL = "Evaluate weights on a data set, with the options of eval.py."
_BENCH = "Measure images per second (p20, p50, p80) and peak memory, and write a record."
_MEMORY = "Predict or measure the GPU memory of a training or inference step."


@dataclasses.dataclass(frozen=True)
class _Own:
    """Command that `cli.main` runs itself; this parser needs it only for its help."""


def parse(arguments: Sequence[str]) -> Any:
    """Return the command with its options, or raise InputError for a value out of range."""
    command: Any = tyro.cli(
        Annotated[_Own, subcommand("train", description=_TRAIN)]
        | Annotated[_Own, subcommand("eval", description=_EVAL)]
        | Annotated[List, subcommand("list")]
        | Annotated[Info, subcommand("info")]
        | Annotated[Bench, subcommand("bench", description=_BENCH)]
        | Annotated[Memory, subcommand("memory", description=_MEMORY)]
        | Annotated[Predict, subcommand("predict")]
        | Annotated[Similar, subcommand("similar")]
        | Annotated[Convert, subcommand("convert")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Push, subcommand("push")]
        | Annotated[Demo, subcommand("demo")]
        | Annotated[Split, subcommand("split")]
        | Annotated[Shard, subcommand("shard")],  # pyright: ignore[reportArgumentType]
        prog="tresnet",
        description=_DESCRIPTION,
        args=_input_size_last(list(arguments)),
        config=(DisallowNone, OmitArgPrefixes, OmitSubcommandPrefixes),
    )
    if isinstance(command, Settings):
        check(command, InputError)
    return command


def _input_size_last(arguments: list[str]) -> list[str]:
    """Move `--input-size H [W]` to the end, because tyro would read a MODEL after H as W."""
    if "--input-size" not in arguments or "--" in arguments:
        return arguments
    begin = arguments.index("--input-size")
    sides = list(itertools.takewhile(str.isdecimal, arguments[begin + 1 :]))
    end = begin + 1 + len(sides)
    return [*arguments[:begin], *arguments[end:], *arguments[begin:end]] if sides else arguments
