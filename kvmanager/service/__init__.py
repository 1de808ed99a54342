"""The gRPC services of the manager, and its metrics."""
