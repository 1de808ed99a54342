"""The suite as local processes: their programs, the checks before they start, and their supervision."""
