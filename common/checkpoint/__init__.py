"""Finds a checkpoint by name and computes its fingerprints. Standard library only."""
