"""The prefix index in Redis: what writes it, and the epoch that fences the writes."""
