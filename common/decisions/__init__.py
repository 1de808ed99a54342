"""Decision records: the ring that keeps them, their log line, and their pages and watches on the wire."""
