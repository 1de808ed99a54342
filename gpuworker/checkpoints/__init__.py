"""The weights of a checkpoint under their plain names, in any stored format."""
