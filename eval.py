"""Evaluate weights; `python eval.py --help` prints the options."""

import sys

from tresnet.cli import shell


def main() -> int:
    """Run the command; the import here takes seconds, and `shell.run` handles Ctrl-C meanwhile."""
    from tresnet.cli.train_eval import eval_command

    return eval_command(sys.argv[1:])


if __name__ == "__main__":
    shell.leave(shell.run(main))
