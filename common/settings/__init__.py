"""Options from flags, environment and a TOML file."""
