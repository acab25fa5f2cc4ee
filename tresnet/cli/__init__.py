"""The `tresnet` command; each subcommand is a dataclass whose fields are the options.

A subcommand's `run(argv)` returns the exit code. Records of measurements store
`argv`, the whole command line.
"""
