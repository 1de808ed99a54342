"""What a model must compute and read, counted by hand on one that is small enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.lib.checkpoints import MEDIUM
from bench.lib.model_costs import ModelCosts

TINY = ModelCosts(
    hidden=4, inner=6, layers=2, heads=2, kv_heads=1, head_dim=3, vocabulary=10, weight_bytes=2, kv_bytes=2
)


def test_the_linears_of_a_layer() -> None:
    """Queries 4x6, keys and values 4x3 each, output 6x4, and three of 4x6."""
    assert TINY.layer_weights == 24 + 12 + 12 + 24 + 3 * 24
    assert TINY.head_weights == 40


def test_a_prefill_counts_its_linears_once_a_token_and_the_keys_before_each() -> None:
    linears = 2 * 3 * 2 * TINY.layer_weights + 2 * 40
    keys = 1 + 2 + 3
    assert TINY.flops(0, 3) == linears + 4 * keys * 2 * 2 * 3


def test_a_later_chunk_attends_to_what_was_there_before() -> None:
    whole = TINY.flops(0, 5, sampled=0)
    assert TINY.flops(0, 3, sampled=0) + TINY.flops(3, 2, sampled=0) == whole


def test_a_decode_reads_all_weights_once_and_each_sequences_own_keys_and_values() -> None:
    weights = (2 * TINY.layer_weights + 40) * 2
    assert TINY.decode_bytes(0, 100) == weights
    assert TINY.decode_bytes(3, 100) - weights == 3 * 100 * 2 * (3 + 3) * 2
    assert TINY.decode_flops(3, 100) == 3 * TINY.flops(99, 1)


def test_a_configuration_gives_the_shape_of_the_peers_model() -> None:
    named = {**MEDIUM, "num_key_value_heads": 4}
    costs = ModelCosts.of(SimpleNamespace(**named), 4.0, 4.0)
    norms = (2 * costs.layers + 1) * costs.hidden
    assert costs.layers * costs.layer_weights + costs.head_weights + norms == pytest.approx(128.4e6, rel=0.001)


def test_heads_divide_the_hidden_size_where_the_configuration_does_not_say() -> None:
    named = {key: value for key, value in MEDIUM.items() if key != "head_dim"}
    assert ModelCosts.of(SimpleNamespace(**named), 4.0, 4.0).head_dim == 64
