"""Ways to run a model on the paged cache, the choice between them, and the tests that hold them to it."""
