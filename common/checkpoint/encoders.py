"""What is said of models that make vectors or scores of texts, in any format: they are served elsewhere."""

from __future__ import annotations

from typing import Final

_ELSEWHERE: Final = (
    "take text-embeddings-inference or infinity for it; Quire embeds with decoders, such as Qwen3-Embedding"
)


def encoder_reason(name: str) -> str:
    """Return why an encoder cannot be served, and which server takes it."""
    return f"{name} is an encoder, for embeddings or reranking, and continues no text: {_ELSEWHERE}"


def scores_reason(name: str) -> str:
    """Return the same for a model of any kind whose head gives scores in place of tokens."""
    return f"{name} gives scores, as for reranking, and continues no text: {_ELSEWHERE}"
