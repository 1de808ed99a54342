"""Parts of every process: cores, logs, metrics, garbage collection, a local Redis."""
