"""Pure decisions of the kvmanager package: standard library and `common` contracts only."""
