"""Sessions with workers: attach, reports, grants."""
