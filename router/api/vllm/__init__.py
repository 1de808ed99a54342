"""The gRPC services that gateways call vLLM by: its own, and the one of SMG's gateway before it."""
