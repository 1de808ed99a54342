"""Checks the constraints of structured output before a request is queued."""
