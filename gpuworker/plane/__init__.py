"""Assembles a worker's data plane from its options: model, memory, runner."""
