"""The group of managers of one pool, of which one leads."""
