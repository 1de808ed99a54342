"""What every process needs: cores, logs, metrics, garbage collection, a local Redis."""
