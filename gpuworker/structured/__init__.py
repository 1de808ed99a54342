"""Structured output: compiled grammars, and the masks that keep each sequence inside its grammar."""
