"""Batches of requests in OpenAI's form: their lines, their results, and which refusals pass."""
