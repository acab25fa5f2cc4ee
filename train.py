"""Train a model; `python train.py --help` prints the options."""

from tresnet.cli import shell


def main() -> int:
    """Run the command; the import here takes seconds, and `shell.run` handles Ctrl-C meanwhile."""
    from tresnet.cli.train_eval import train_command

    return train_command(shell.arguments())


if __name__ == "__main__":
    shell.leave(shell.run(main))
