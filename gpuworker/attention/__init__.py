"""Paged attention: one interface, its backends, and the plans they make for a step."""
