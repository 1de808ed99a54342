"""Segments of a decision log as bytes, and which of them are kept. Standard library and `limits` alone."""
