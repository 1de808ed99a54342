"""The engine thread: turns requests and grants into steps, and steps into tokens and reports."""
