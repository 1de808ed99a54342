"""gRPC as Quire uses it: server and channel with their limits, health, and the one mapping of errors to statuses."""
