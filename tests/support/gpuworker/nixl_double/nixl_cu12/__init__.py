"""Stands in for the package nixl-cu12 in the agent processes of tests, between processes of one host."""
