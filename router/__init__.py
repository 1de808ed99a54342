"""The router: admits requests, finds cached prefixes in Redis, chooses a GPU worker and streams its tokens back."""
