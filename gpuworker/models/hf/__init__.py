"""Any Hugging Face decoder, run by transformers with Quire's paged attention in it."""
