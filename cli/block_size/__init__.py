"""Advice on the block size from a log of request lengths."""
