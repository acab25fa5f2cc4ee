"""The `tresnet` command; each subcommand is a function whose parameters are the options."""
