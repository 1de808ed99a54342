"""The prefix index in Redis: its writer, and the epoch that fences the writes."""
