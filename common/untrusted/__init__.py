"""Text and ids that come from peers: their form, how many log lines they may cause, what a line must not show."""
