"""The weights of a checkpoint under their plain names, in whatever format they are stored."""
