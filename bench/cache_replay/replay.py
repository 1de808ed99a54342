"""Replays requests on the pool core of a ledger: look-up, references, eviction, seals and releases alone."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bench.cache_replay.workloads import BLOCK_SIZE, CacheRequest
from common.contracts.clock import ManualClock
from common.contracts.lease import Reserve
from common.contracts.types import BlockHash, BlockId, SequenceId
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.ledger_config import EvictionName, LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.evicting import evict_until_free
from kvmanager.ledger.ledger_state import LedgerState


@dataclass(slots=True)
class Replayed:
    """What a replay gave: blocks asked for, found and computed, and its CPU seconds."""

    asked: int = 0
    found: int = 0
    computed: int = 0
    # Of the requests that ask for retention, whether they get it or not.
    asked_retained: int = 0
    found_retained: int = 0
    seconds: float = 0.0

    @property
    def touched(self) -> int:
        return self.found + self.computed

    @property
    def hit_rate(self) -> float:
        return self.found / self.asked


def pool_of(num_blocks: int, policy: EvictionName = "lru", retention_share: float = 0.0) -> LedgerState:
    """Return the state of a ledger without a block in use."""
    numbers = itertools.count(1)
    config = LedgerConfig(num_blocks, BLOCK_SIZE, eviction=policy, retention_share=retention_share)
    return LedgerState(config, ManualClock(), lambda: f"d{next(numbers)}")


def replay(
    state: LedgerState, requests: Items[CacheRequest], starts: Callable[[int], None] = lambda _: None
) -> Replayed:
    """Serve the requests; count those after the first quarter. `starts` gets each one's number.

    One follows the other, but for those that last. Where these leave no room, the next one waits for the first to end.
    """
    result, running = Replayed(), list[tuple[float, int, list[BlockId]]]()
    begin = time.process_time()
    for number, request in enumerate(requests):
        if number == len(requests) // 4:
            result, begin = Replayed(), time.process_time()
        if request.at:
            assert isinstance(state.clock, ManualClock)
            state.clock.now = max(state.clock.now, request.at)
        needed = len(request.prompt) + len(request.output)
        while running and (running[0][0] <= request.at or state.store.pool.available < needed):
            state.store.release_blocks(reversed(heapq.heappop(running)[2]))
        starts(number)
        table = _serve(state, request, result)
        if request.lasts:
            heapq.heappush(running, (request.at + request.lasts, number, table))
        else:
            state.store.release_blocks(reversed(table))
    result.seconds = time.process_time() - begin
    return result


def _count_retained(state: LedgerState, request: CacheRequest, result: Replayed) -> None:
    result.asked_retained += len(request.prompt)
    result.found_retained += len(state.store.cache.find_longest_prefix(request.prompt, len(request.prompt)))


def _retain(state: LedgerState, request: CacheRequest, table: list[BlockId], hits: int) -> None:
    """Mark the blocks of a request; with a share of 0 the ledger marks none."""
    tokens = len(table) * BLOCK_SIZE
    sequence = Sequence(Reserve(SequenceId(0), tokens, tokens, retention=request.retention), 0, BLOCK_SIZE, 0.0)
    sequence.block_table, sequence.n_shared = table, hits
    state.store.retention.mark_blocks(sequence, sequence.block_table)


def _serve(state: LedgerState, request: CacheRequest, result: Replayed) -> list[BlockId]:
    """Give a request its blocks, and return them."""
    if request.retention:
        _count_retained(state, request, result)
    pool, cache, prompt = state.store.pool, state.store.cache, request.prompt
    hits = cache.find_longest_prefix(prompt, len(prompt))
    table = list(hits)
    for held in table:
        pool.hold_block(held)
    content = (*prompt, *request.output)
    fresh = len(content) - len(hits)
    evict_until_free(state, fresh, None)
    parent: BlockHash = prompt[len(hits) - 1] if hits else ROOT
    for index in range(len(hits), len(content)):
        block = pool.take_block()
        state.store.blocks.index[block] = index
        state.store.publish_block(block, content[index], parent)
        table.append(block)
        parent = content[index]
    if request.retention:
        _retain(state, request, table, len(hits))
    result.asked += len(prompt)
    result.found += len(hits)
    result.computed += fresh
    cache.events.clear()
    state.decisions.drain()
    return table
