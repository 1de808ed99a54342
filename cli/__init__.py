"""The `quire` command: starts a suite, sends requests to it, and shows its state, traces and dumps."""
