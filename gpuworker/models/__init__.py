"""Ways to run a model on the paged cache, the choice between them, and their start-up tests."""
