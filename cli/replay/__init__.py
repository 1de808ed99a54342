"""Replays recorded arrivals: the real cores of router, KV manager and worker run against simulated steps."""
