"""Batches of requests in OpenAI's form: read from a file, sent to a running suite, answered in another file."""
