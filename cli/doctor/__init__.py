"""The checks of `quire doctor`: what this machine has, and what to do about what it lacks."""
