"""Cached blocks of one worker: prefix matches, windows, retention, pins and eviction. Pure."""
