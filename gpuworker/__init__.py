"""The GPU worker: decides when a step runs, and runs it on the blocks that the KV manager leased to it."""
