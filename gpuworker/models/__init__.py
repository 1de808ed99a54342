"""Models: loading a checkpoint, running it on the paged cache, and the test that it runs right."""
