"""Operations and bytes of a step of a Llama-shaped model, from its shape alone: the floor of a step's time.

A product of [m, k] and [k, n] counts 2·m·k·n operations. A token at position p attends to p + 1 keys. Each byte of
weights and K/V is read once a step; activations are not counted, because they stay in caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Sizes of a model, and of its numbers in bytes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weight_bytes: float
    kv_bytes: float

    @staticmethod
    def of(config: Any, weight_bytes: float, kv_bytes: float) -> ModelCosts:
        """Return the costs of a model from its configuration in Hugging Face's names."""
        heads = config.num_attention_heads
        return ModelCosts(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the linears of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        """Numbers in the linear that makes logits."""
        return self.vocabulary * self.hidden

    def flops(self, start: int, length: int, sampled: int = 1) -> float:
        """Return operations for positions start .. start + length - 1 of a sequence, with logits for `sampled`."""
        linears = 2 * length * self.layers * self.layer_weights + 2 * sampled * self.head_weights
        keys = length * start + length * (length + 1) // 2
        return float(linears + 4 * keys * self.layers * self.heads * self.head_dim)

    def decode_flops(self, batch: int, context: float) -> float:
        """Return operations of a step that samples one token for each of `batch` sequences of this length."""
        linears = 2 * batch * (self.layers * self.layer_weights + self.head_weights)
        return linears + 4 * batch * context * self.layers * self.heads * self.head_dim

    def decode_bytes(self, batch: int, context: float) -> float:
        """Return the bytes that such a step reads."""
        weights = (self.layers * self.layer_weights + self.head_weights) * self.weight_bytes
        return weights + batch * context * self.layers * 2 * self.kv_heads * self.head_dim * self.kv_bytes
