"""Entry point of the `tresnet` command."""

import os
from collections.abc import Sequence
from contextvars import copy_context

from tresnet.cli import shell
from tresnet.cli.output import say
from tresnet.process import command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: this process's arguments) and return its exit code."""
    arguments = shell.arguments() if argv is None else list(argv)
    return copy_context().run(shell.run, lambda: _command(arguments))


def _command(arguments: list[str]) -> int:
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # tyro reads this at its import
    if arguments == ["--version"]:
        from tresnet.environment import __version__

        say(f"tresnet {__version__}")
        return 0
    if arguments[:1] in (["train"], ["eval"]):
        from tresnet.cli import train_eval

        command = train_eval.train_command if arguments[0] == "train" else train_eval.eval_command
        return command(arguments[1:], f"tresnet {arguments[0]}")
    from tresnet.cli.commands import parse

    command_line.set(["tresnet", *arguments])  # as records name it
    return parse(arguments)()


if __name__ == "__main__":
    shell.leave(main())  # `torchrun -m tresnet.cli.main train` comes here
