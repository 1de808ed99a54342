"""Replays requests on the pool core of a ledger: look-up, references, eviction, seals and releases alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from bench.cache_replay.workloads import BLOCK_SIZE, CacheRequest
from common.clock import ManualClock
from common.types import BlockHash
from kvmanager.core.block import ROOT
from kvmanager.core.block_granter import BlockGranter
from kvmanager.core.config import EvictionName, LedgerConfig
from kvmanager.core.ledger_state import LedgerState


@dataclass(slots=True)
class Replayed:
    """What a replay gave: blocks asked for, found and computed, and its CPU seconds."""

    asked: int = 0
    found: int = 0
    computed: int = 0
    seconds: float = 0.0

    @property
    def touched(self) -> int:
        return self.found + self.computed

    @property
    def hit_rate(self) -> float:
        return self.found / self.asked


def pool_of(num_blocks: int, policy: EvictionName = "lru") -> LedgerState:
    """Return the state of a ledger without a block in use."""
    numbers = itertools.count(1)
    config = LedgerConfig(num_blocks, BLOCK_SIZE, eviction=policy)
    return LedgerState(config, ManualClock(), lambda: f"d{next(numbers)}")


def replay(
    state: LedgerState, requests: Items[CacheRequest], starts: Callable[[int], None] = lambda _: None
) -> Replayed:
    """Serve the requests one after the other; count those after the first quarter. `starts` gets each one's number."""
    result, granter = Replayed(), BlockGranter()
    begin = time.process_time()
    for number, request in enumerate(requests):
        if number == len(requests) // 4:
            result, begin = Replayed(), time.process_time()
        starts(number)
        _serve(state, granter, request, result)
    result.seconds = time.process_time() - begin
    return result


def _serve(state: LedgerState, granter: BlockGranter, request: CacheRequest, result: Replayed) -> None:
    pool, cache, prompt = state.block_pool, state.cache, request.prompt
    hits = cache.longest(prompt, len(prompt))
    table = list(hits)
    for held in table:
        pool.hold(held)
    content = (*prompt, *request.output)
    fresh = len(content) - len(hits)
    granter.make_free(state, fresh, None)
    parent: BlockHash = prompt[len(hits) - 1] if hits else ROOT
    for index in range(len(hits), len(content)):
        block = pool.take()
        state.blocks.index[block] = index
        state.publish(block, content[index], parent)
        table.append(block)
        parent = content[index]
    for block in reversed(table):
        state.release(block)
    result.asked += len(prompt)
    result.found += len(hits)
    result.computed += fresh
    cache.events.clear()
    state.decisions.drain()
