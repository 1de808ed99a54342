"""Sends the requests of a batch to a running suite."""
