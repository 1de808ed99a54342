"""Benchmarks, one in a file. Each prints a table; --json adds one JSON object of named figures as the last line."""
