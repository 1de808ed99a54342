"""The worker's gRPC service: streams of routers, their outputs, spans and metrics."""
