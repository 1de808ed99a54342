"""Blocks that workers fetch from each other: tokens are in `common/contracts/transfer_tokens.py`, the rest is here."""
