"""Blocks with the content of other blocks: a repeated request costs no cached content and slows no look-up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from common.contracts.lease import CachedBlock, Inventory, Report
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from kvmanager.contracts.block import BlockState
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import (
    admit,
    block_table,
    copies,
    finish,
    free_order,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
    seal,
)


def answer_once(ledger: Ledger, number: int, tokens: list[int], prompt_tokens: int) -> None:
    """Run one request whose output are the last of `tokens`; all full blocks are sealed."""
    sequence, keys = SequenceId(number), hashes(tokens)
    ledger.apply_report(Report(reserve=(reserve(number, tokens[:prompt_tokens], max_len=len(tokens) + 1),)))
    ledger.schedule()
    ledger.apply_report(Report(lease_want=(len(tokens) - prompt_tokens) // 16))
    batch = ledger.schedule()
    assert batch is not None
    ledger.apply_report(Report(bind=tuple((sequence, block) for block in batch.lease)))
    table = block_table(ledger, number)
    fresh = [
        (block, key) for block, key in zip(table, keys, strict=True) if ledger.state.store.blocks.hash[block] is None
    ]
    ledger.apply_report(Report(seal=tuple(fresh), finished=((sequence, FinishReason.STOP),)))
    ledger.schedule()


def remaining(ledger: Ledger, prompts: list[tuple[BlockHash, ...]]) -> int:
    return sum(ledger.look_up_prompt(keys, 161).hit_blocks for keys in prompts)


@pytest.mark.searches
def test_repeats_of_one_request_evict_no_other_content() -> None:
    ledger = make_ledger(1000)
    prompts = [hashes(prompt(160, start=1000 * number)) for number in range(50)]
    for number in range(50):
        run_through(ledger, number, prompt(160, start=1000 * number))
    for number in range(300):
        answer_once(ledger, 50 + number, prompt(128, start=90_000), 64)
    ledger.check_invariants()
    assert remaining(ledger, prompts) == 500
    assert not ledger.state.store.cache.copies
    assert ledger.pool_counts().cached == 500 + 8


def test_the_copy_that_is_released_last_stays() -> None:
    ledger, keys = make_ledger(6), hashes(prompt(16))
    admit(ledger, reserve(1, prompt(16)), reserve(2, prompt(16)))
    play(ledger, seal=((0, keys[0]), (1, keys[0])))
    assert ledger.state.store.cache.copies_of(keys[0]) == [0, 1]
    finish(ledger, 1)
    assert (ledger.pool_counts().cached, ledger.state.store.cache.copies_of(keys[0])) == (0, [1])
    finish(ledger, 2)
    assert (ledger.pool_counts().cached, ledger.state.store.cache.copies_of(keys[0])) == (1, [1])
    assert free_order(ledger) == [2, 3, 4, 5, 0, 1]


def test_a_cached_copy_is_free_once_a_block_in_use_has_its_content() -> None:
    ledger, keys = make_ledger(6), hashes(prompt(32))
    run_through(ledger, 1, prompt(32))
    ledger.drain_index_events()
    admit(ledger, reserve(2, prompt(32)))  # the block of the last token is no hit
    assert block_table(ledger, 2) == (0, 2)
    seal(ledger, 2, keys)
    assert ledger.state.store.cache.copies_of(keys[1]) == [2]
    assert ledger.state.store.blocks.state[1] is BlockState.FREE
    assert ledger.drain_index_events() == (), "the hash had a copy all the time"
    assert ledger.pool_counts().totals.evictions == 0


def test_a_parent_whose_older_copy_left_outlives_its_child() -> None:
    """The child is younger than the cached copy of its parent, and would else be evicted after it."""
    ledger, keys = make_ledger(4), hashes(prompt(48))
    run_through(ledger, 1, prompt(32))
    admit(ledger, reserve(2, [*prompt(33), 7]))  # takes both blocks as hits
    admit(ledger, reserve(3, prompt(16)))
    seal(ledger, 3, keys[:1])
    finish(ledger, 3)
    finish(ledger, 2)
    assert free_order(ledger)[-2:] == [1, 0]
    for number in range(10, 14):
        run_through(ledger, number, prompt(16, start=100 * number))
    assert not set(keys) & set(ledger.state.store.cache.entries)


def test_a_rebuild_keeps_one_copy_that_no_table_holds() -> None:
    ledger, keys = make_ledger(8), hashes(prompt(32))
    claims = [(0, keys[0], -1), (3, keys[0], -1), (5, keys[1], 0), (6, keys[1], 1)]
    ledger.rebuild(inventory(claims))
    ledger.check_invariants()
    assert copies(ledger) == {keys[0]: [0], keys[1]: [5]}
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (2, 6)


class _ReadList(list[Any]):
    """Counts each entry that is read."""

    def __init__(self, name: str, reads: Counter[str], content: Any) -> None:
        super().__init__(content)
        self._name, self._reads = name, reads

    def __getitem__(self, key: Any) -> Any:
        self._reads[self._name] += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        for each in super().__iter__():
            self._reads[self._name] += 1
            yield each

    def __contains__(self, value: object) -> bool:
        return any(each == value for each in self)


class _ReadDict(dict[Any, Any]):
    """Counts each entry that is looked up or walked over."""

    def __init__(self, name: str, reads: Counter[str], content: Any) -> None:
        super().__init__(content)
        self._name, self._reads = name, reads

    def __getitem__(self, key: Any) -> Any:
        self._reads[self._name] += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._reads[self._name] += 1
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._reads[self._name] += 1
        return super().__contains__(key)

    def __iter__(self) -> Any:
        self._reads[self._name] += len(self)
        return super().__iter__()

    def values(self) -> Any:
        self._reads[self._name] += len(self)
        return super().values()

    def items(self) -> Any:
        self._reads[self._name] += len(self)
        return super().items()


def reads_of_a_look_up(holders: int, prompt_blocks: int) -> Counter[str]:
    """Return what a look-up reads of the cache and of the blocks while so many sequences hold a copy of each block."""
    tokens = prompt(16 * prompt_blocks + 1)
    ledger, keys = make_ledger((prompt_blocks + 1) * holders, watermark=0.0), hashes(tokens)
    numbers = range(1, holders + 1)
    play(ledger, reserve=tuple(reserve(number, tokens, computes_all=True) for number in numbers))
    tables = [block_table(ledger, number) for number in numbers]
    play(ledger, seal=tuple((block, key) for table in tables for block, key in zip(table, keys, strict=False)))
    cache, blocks, reads = ledger.state.store.cache, ledger.state.store.blocks, Counter[str]()
    assert [len(cache.copies_of(key)) for key in keys] == [holders] * prompt_blocks
    cache.entries = _ReadDict("entries", reads, cache.entries)
    cache.pending = _ReadDict("pending", reads, cache.pending)
    copies_of = {key: _ReadList("copies", reads, each) for key, each in cache.copies.items()}
    cache.copies = _ReadDict("copies", reads, copies_of)
    blocks.index, blocks.parent = _ReadList("index", reads, blocks.index), _ReadList("parent", reads, blocks.parent)
    assert ledger.look_up_prompt(keys, len(tokens)).hit_blocks == prompt_blocks
    return reads


@pytest.mark.parametrize("holders", [2, 200])
def test_a_look_up_reads_as_much_with_200_live_copies_of_each_block_as_with_2(holders: int) -> None:
    """It reads the first copy of each hash, and that block's place and parent, and no list of copies."""
    assert reads_of_a_look_up(holders, 10) == {"entries": 10, "index": 10, "parent": 10}


def inventory(claims: list[tuple[int, BlockHash, int]]) -> Inventory:
    return Inventory(cached_blocks=tuple(CachedBlock(BlockId(block), key, parent, 0) for block, key, parent in claims))
