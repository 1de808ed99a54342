"""The code that made the demo model: its texts, its tokenizer, its training, its grades."""
