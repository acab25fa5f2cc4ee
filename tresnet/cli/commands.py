"""Parse the command line of `tresnet` into the call of a command, a function with its options."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import DisallowNone, OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from tresnet.cli.bench import bench_infer, bench_max_batch, bench_train
from tresnet.cli.convert_push import convert, push
from tresnet.cli.demo import demo
from tresnet.cli.export import export
from tresnet.cli.memory import memory_max_batch, memory_measure, memory_predict
from tresnet.cli.models import info, list_all
from tresnet.cli.predict import predict
from tresnet.cli.shard import shard
from tresnet.cli.similar import similar
from tresnet.cli.split import split
from tresnet.settings.fields import check_call, deferred

_DESCRIPTION = """TResNet image classifiers: models, weights, predictions and measurements.

`tresnet COMMAND --help` explains a command; `tresnet --version` prints the version."""


def parse(arguments: Sequence[str]) -> "functools.partial[int]":
    """Return the call of a command with its options; InputError: a value is out of range."""
    call = tyro.cli(
        _union(train=_train, eval=_eval, list=list_all, info=info)
        | Annotated[_BENCH, subcommand("bench", description=_BENCH_HELP)]
        | Annotated[_MEMORY, subcommand("memory", description=_MEMORY_HELP)]
        | _union(predict=predict, similar=similar, convert=convert, export=export)
        | _union(push=push, demo=demo, split=split, shard=shard),
        prog="tresnet",
        description=_DESCRIPTION,
        args=_input_size_last(list(arguments)),
        config=(DisallowNone, OmitArgPrefixes, OmitSubcommandPrefixes),
    )
    return check_call(call)


def _union(**commands: Callable[..., int]) -> Any:
    each = (
        Annotated[Any, subcommand(name.replace("_", "-"), constructor=deferred(function))]
        for name, function in commands.items()
    )
    return functools.reduce(operator.or_, each)


def _train() -> int:  # `cli.main` runs train and eval itself
    """Train a model, with the options of train.py."""
    raise AssertionError


def _eval() -> int:
    """Evaluate weights on a data set, with the options of eval.py."""
    raise AssertionError


_BENCH_HELP = "Measure images per second (p20, p50, p80) and peak memory, and write a record."
_BENCH = _union(train=bench_train, infer=bench_infer, max_batch=bench_max_batch)
_MEMORY_HELP = "Predict or measure the GPU memory of a training or inference step."
_MEMORY = _union(predict=memory_predict, measure=memory_measure, max_batch=memory_max_batch)


def _input_size_last(arguments: list[str]) -> list[str]:
    """Move `--input-size H [W]` to the end, because tyro would read a MODEL after H as W."""
    if "--input-size" not in arguments or "--" in arguments:
        return arguments
    begin = arguments.index("--input-size")
    sides = list(itertools.takewhile(str.isdecimal, arguments[begin + 1 :]))
    end = begin + 1 + len(sides)
    return [*arguments[:begin], *arguments[end:], *arguments[begin:end]] if sides else arguments
