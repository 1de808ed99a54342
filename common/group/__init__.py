"""A group of KV managers as its workers and routers see it: which one leads."""
