"""Text: tokens, chat templates, detokenisation, stop strings."""
