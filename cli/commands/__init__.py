"""The subcommands of `quire`, one a file."""
