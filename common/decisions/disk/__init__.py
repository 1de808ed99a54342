"""The decision log on disk: `core/` has the format and what is kept, the files here write and read it."""
