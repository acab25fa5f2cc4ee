"""The `tresnet` command: each subcommand is a dataclass of its options.

Its `run(argv)` gets the complete command line for its record, and returns the exit code.
"""
