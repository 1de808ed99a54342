"""Implementations of the attention interface (`gpuworker/attention.py`)."""
