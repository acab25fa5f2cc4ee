"""Trains a model: reads the options, calls the engine."""

import sys

from tresnet.cli import shell


def main() -> int:
    """Import the command, which takes seconds, and run it."""
    from tresnet.cli.train import train_command

    return train_command(sys.argv[1:])


if __name__ == "__main__":
    shell.leave(shell.run(main))
