"""Triton and torch kernels that models call beside attention."""
