"""A checkpoint by name: where it lies, and its fingerprints. Standard library only."""
