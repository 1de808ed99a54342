"""Decision records: the ring that keeps them, and their log line."""
