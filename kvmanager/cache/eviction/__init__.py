"""The order in which cached blocks are evicted: one interface, several policies."""
