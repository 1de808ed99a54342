"""The workers that the router knows: discovery, one stream each, and their pool."""
