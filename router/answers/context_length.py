"""Words for requests that the context cannot hold: clients recognise them, and shorten the conversation."""

from __future__ import annotations

from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, FieldViolation


def beyond_context(field: str, context: int, what: str) -> FieldViolation:
    """Return the violation of a field; `what` follows the context's length, and says what to do."""
    words = f"This model's maximum context length is {context} tokens. However, {what}"
    return FieldViolation(field, words, CONTEXT_LENGTH_EXCEEDED)
