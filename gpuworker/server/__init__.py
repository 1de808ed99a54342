"""The worker's gRPC face: streams of routers, their outputs, spans and metrics."""
