"""GGUF files as checkpoints: a folder in Hugging Face format is made from a file's header. Standard library only."""
