"""Benchmarks, one a file: each prints a table and, with --json, one object of named figures as its last line."""
