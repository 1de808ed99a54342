"""The `quire` command: brings the suite up, talks to it, and shows what it decided."""
