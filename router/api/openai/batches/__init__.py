"""OpenAI's files and batches over HTTP: what clients upload lies on disk, and the router runs its lines."""
