"""The list that orders cached blocks."""

from __future__ import annotations

import random

import pytest

from common.contracts.types import BlockId
from kvmanager.cache.eviction.lru import LinkedBlocks


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_first_in_first_out() -> None:
    blocks = LinkedBlocks(4, ids(2, 0, 3))
    blocks.append(BlockId(1))
    assert [blocks.popleft() for _ in range(4)] == [2, 0, 3, 1]
    assert len(blocks) == 0


def test_a_block_leaves_the_middle_and_the_length_follows() -> None:
    blocks = LinkedBlocks(5, ids(0, 1, 2, 3, 4))
    blocks.remove(BlockId(2))
    assert (list(blocks), len(blocks), BlockId(2) in blocks) == ([0, 1, 3, 4], 4, False)
    blocks.append(BlockId(2))
    assert list(blocks) == [0, 1, 3, 4, 2]


def test_ends_can_be_removed_too() -> None:
    blocks = LinkedBlocks(3, ids(0, 1, 2))
    blocks.remove(BlockId(0))
    blocks.remove(BlockId(2))
    assert list(blocks) == [1]
    blocks.remove(BlockId(1))
    assert list(blocks) == []


def test_misuse_is_the_callers_bug() -> None:
    blocks = LinkedBlocks(2, ids(0))
    with pytest.raises(ValueError, match="already"):
        blocks.append(BlockId(0))
    with pytest.raises(ValueError, match="not in the list"):
        blocks.remove(BlockId(1))
    blocks.popleft()
    with pytest.raises(IndexError):
        blocks.popleft()


def test_it_orders_as_a_plain_list_does() -> None:
    pick, plain, blocks = random.Random(4), list(range(20)), LinkedBlocks(20, ids(*range(20)))
    for _ in range(2000):
        block = BlockId(pick.randrange(20))
        if block in plain:
            plain.remove(block)
            blocks.remove(block)
        else:
            plain.append(block)
            blocks.append(block)
        assert list(blocks) == plain
        assert len(blocks) == len(plain)
