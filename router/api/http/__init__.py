"""The HTTP server that the APIs over HTTP share."""
