"""Pure decisions of the gpuworker package: standard library and `common` contracts only."""
