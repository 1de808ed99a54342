"""What the client APIs share: the HTTP server, the context of a gRPC call, the ranges of numbers in JSON."""
