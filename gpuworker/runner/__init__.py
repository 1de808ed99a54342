"""Runs planned steps on the device: batch layout, executors, CUDA graphs."""
