"""The router's side of its workers: discovery, one stream each, and their pool."""
