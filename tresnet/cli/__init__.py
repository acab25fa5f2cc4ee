"""The `tresnet` command.

Each subcommand is a dataclass of its options with `run(argv)`, which gets the complete command line
for its record and returns the exit code.
"""
