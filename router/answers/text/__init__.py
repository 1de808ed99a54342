"""Text: tokenizer, chat templates, detokenizer, stop strings."""
