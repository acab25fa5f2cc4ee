"""The `tresnet` command; each subcommand is a dataclass whose fields are the options."""
