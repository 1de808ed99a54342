"""Drawings for terminals: traces and decisions."""
