"""Entry point of the `tresnet` command."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

from tresnet.cli.bench import Bench
from tresnet.cli.convert import Convert
from tresnet.cli.info import Info
from tresnet.cli.list import List
from tresnet.cli.memory import Memory
from tresnet.cli.output import fail, say
from tresnet.cli.predict import Predict
from tresnet.errors import TResNetError

BAD_INPUT_EXIT_CODE = 2
BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it

_DESCRIPTION = """TResNet image classifiers: models, weights, predictions and measurements.

`tresnet COMMAND --help` explains a command; `tresnet --version` prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments after the program's name; None for this process's.

    Returns:
        0; 1 if a part of the work failed (the rest is done); 2 for bad input; 130 on Ctrl-C;
        141 when nobody reads the output any more.

    Raises:
        SystemExit: after `--help` (0) or arguments that do not parse (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        from tresnet.env import package_version

        say(f"tresnet {package_version() or 'of unknown version'}")
        return 0
    try:
        return _parse(arguments).run(arguments)
    except TResNetError as error:
        fail(error)
        return BAD_INPUT_EXIT_CODE
    except (RuntimeError, MemoryError) as error:
        from tresnet.measure.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        fail(f"the memory is full: {str(error).partition(chr(10))[0]}: ask for smaller sizes")
        return BAD_INPUT_EXIT_CODE
    except KeyboardInterrupt:
        fail("interrupted")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # the reader, `head` say, has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE


def _parse(arguments: Sequence[str]) -> List | Info | Bench | Memory | Predict | Convert:
    import tyro
    from tyro.conf import (
        DisallowNone,
        FlagCreatePairsOff,
        OmitArgPrefixes,
        OmitSubcommandPrefixes,
        subcommand,
    )

    return tyro.cli(
        Annotated[List, subcommand("list")]
        | Annotated[Info, subcommand("info")]
        | Annotated[Bench, subcommand("bench")]
        | Annotated[Memory, subcommand("memory")]
        | Annotated[Predict, subcommand("predict")]
        | Annotated[Convert, subcommand("convert")],  # pyright: ignore[reportArgumentType]
        prog="tresnet",
        description=_DESCRIPTION,
        args=arguments,
        config=(DisallowNone, FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes),
    )


if __name__ == "__main__":
    sys.exit(main())
