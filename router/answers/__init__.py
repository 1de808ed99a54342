"""What stands between tokens and an answer: text, dialects of calls and thoughts, constraints."""
