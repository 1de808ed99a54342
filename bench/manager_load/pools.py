"""Large pools of the manager's core: their rebuild, their memory, and the cost of a block as they grow."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from typing import Final

import psutil

from bench.cache_replay.replay import pool_of, replay
from bench.cache_replay.workloads import CacheRequest
from common.contracts.clock import SystemClock
from common.contracts.lease import CachedBlock, Inventory
from common.contracts.types import BlockHash, BlockId
from common.wire.inventory_codec import InventoryAssembler, InventoryBounds, inventory_chunks
from kvmanager.contracts.ledger_config import EvictionName, LedgerConfig
from kvmanager.ledger.ledger import Ledger
from quire.kvmanager.v1 import kvmanager_pb2

_CHAIN: Final = 32
_WORKERS: Final = 8
_MILLION: Final = 1 << 20


def inventory_of(num_blocks: int, first: int = 0) -> Inventory:
    """Return the inventory of an idle worker whose whole pool is cached, in chains of 32 blocks."""
    hashes = (BlockHash((first + block + 1).to_bytes(16, "little")) for block in range(num_blocks))
    cached = (
        CachedBlock(BlockId(block), key, block - 1 if block % _CHAIN else -1, block // _CHAIN)
        for block, key in enumerate(hashes)
    )
    return Inventory(cached_blocks=tuple(cached))


def _rebuilt(chunks: list[bytes], num_blocks: int) -> Ledger:
    """Do what a manager does when a worker attaches: decode the chunks, rebuild the ledger."""
    assembler, inventory = InventoryAssembler(InventoryBounds(1 << 16, 1 << 30, num_blocks)), None
    for chunk in chunks:
        inventory = assembler.add(kvmanager_pb2.Inventory.FromString(chunk))
    assert inventory is not None
    numbers = itertools.count()
    ledger = Ledger(LedgerConfig(num_blocks, 16), SystemClock(), lambda: str(next(numbers)))
    ledger.rebuild(inventory)
    return ledger


def rebuild_figures() -> dict[str, float]:
    """Return the seconds to rebuild 2^20 blocks of eight workers, and the bytes that a block takes then."""
    share = _MILLION // _WORKERS
    encoded = [
        [chunk.SerializeToString() for chunk in inventory_chunks(inventory_of(share, worker * share))]
        for worker in range(_WORKERS)
    ]
    gc.collect()
    process = psutil.Process(os.getpid())
    before, began = process.memory_info().rss, time.process_time()
    ledgers = [_rebuilt(chunks, share) for chunks in encoded]
    seconds = time.process_time() - began
    gc.collect()
    used = process.memory_info().rss - before
    assert sum(ledger.pool_counts().cached for ledger in ledgers) == _MILLION
    return {"rebuild_1m_s": seconds, "bytes_per_block_1m": used / _MILLION}


def _singles(first: int, count: int) -> Iterator[CacheRequest]:
    """Yield requests of one chain each, none of which was there before."""
    numbers = itertools.count(first)
    for _ in range(count):
        chain = tuple(BlockHash(next(numbers).to_bytes(16, "little")) for _ in range(_CHAIN))
        yield CacheRequest(chain, ())


def growth_figures(policy: EvictionName, sizes: tuple[int, ...], blocks: int) -> dict[str, float]:
    """Return the CPU nanoseconds of a new block in full pools of several sizes, and the last over the first."""
    found: dict[int, float] = {}
    for size in sizes:
        state = pool_of(size, policy)
        replay(state, list(_singles(1, size // _CHAIN)))
        runs = []
        for number in range(3):
            requests = list(_singles((number + 2) << 40, blocks // _CHAIN))
            gc.collect()
            began = time.process_time()
            replay(state, requests)
            runs.append((time.process_time() - began) / (len(requests) * _CHAIN))
        found[size] = 1e9 * min(runs)
    named = {f"ns_per_block_{size}_{policy}": value for size, value in found.items()}
    return named | {f"growth_{policy}": found[sizes[-1]] / found[sizes[0]]}
