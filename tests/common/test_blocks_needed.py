"""The blocks of a sequence at its longest: one number by which router, worker and manager refuse."""

from __future__ import annotations

import pytest

from common.contracts.lease import blocks_needed


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "blocks"),
    [(1, 1, 1), (1, 2, 1), (64, 65, 4), (64, 66, 5), (64, 64, 4), (65, 65, 5), (16, 17, 1), (16, 18, 2)],
)
def test_the_last_token_needs_a_slot_only_if_it_is_of_the_prompt(num_tokens: int, max_len: int, blocks: int) -> None:
    assert blocks_needed(num_tokens, max_len, 16) == blocks


@pytest.mark.parametrize(("window", "blocks"), [(0, 27), (1, 2), (4, 3), (5, 3), (6, 4), (8, 4), (9, 4), (100, 27)])
def test_where_every_layer_has_a_window_a_long_sequence_needs_no_more_than_it(window: int, blocks: int) -> None:
    assert blocks_needed(20, 109, 4, window) == blocks
