"""Pure decisions of the router package: standard library and `common` contracts only."""
