"""Short ways to make ledgers, prompts and reports for tests with exact block ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from common.contracts.clock import ManualClock
from common.contracts.hashing import (
    PARTIAL_HASHES,
    all_partial_hashes,
    block_digests,
    block_hash_of,
    little_endian_int32,
)
from common.contracts.lease import Admit, GrantBatch, Inventory, Report, Reserve
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

ROOT = b"root of a test's chains".ljust(32, b".")
EMPTY = Inventory()


def counted_ids(prefix: str = "d") -> Any:
    """Return a source of decision ids d1, d2, ..."""
    numbers = itertools.count(1)
    return lambda: f"{prefix}{next(numbers)}"


def make_ledger(
    num_blocks: int,
    block_size: int = 16,
    clock: ManualClock | None = None,
    **options: Any,
) -> Ledger:
    """Return a ledger with LRU and without runway beyond the worker's own want: block ids are then easy to follow."""
    options.setdefault("runway_reach", options.get("runway_slots", 32))
    options.setdefault("eviction", "lru")
    config = LedgerConfig(num_blocks, block_size, **options)
    return Ledger(config, clock or ManualClock(), counted_ids())


def hashes(tokens: Sequence[int], block_size: int = 16, root: bytes = ROOT) -> tuple[BlockHash, ...]:
    """Return the hashes of the full blocks of `tokens`."""
    return tuple(map(block_hash_of, block_digests(root, tokens, block_size)))


def parts(tokens: Sequence[int], block_size: int = 64) -> tuple[BlockHash, ...]:
    """Return the partial hashes of all blocks of `tokens`."""
    return all_partial_hashes(ROOT, hashes(tokens, block_size), little_endian_int32(tokens), block_size)


def sealed_parts(tokens: Sequence[int], block_size: int = 64) -> tuple[tuple[BlockHash, tuple[BlockHash, ...]], ...]:
    """Return the partial hashes of the full blocks of `tokens` as a report has them."""
    known, contents = parts(tokens, block_size), hashes(tokens, block_size)
    return tuple((each, known[PARTIAL_HASHES * n : PARTIAL_HASHES * (n + 1)]) for n, each in enumerate(contents))


def prompt(length: int, start: int = 0) -> list[int]:
    """Return `length` tokens that no prompt with another start has in common."""
    return list(range(start, start + length))


def reserve(number: int, tokens: Sequence[int], max_len: int = 0, block_size: int = 16, **options: Any) -> Reserve:
    """Return a reservation for a prompt; by default it does not grow."""
    options.setdefault("block_hashes", hashes(tokens, block_size))
    options.setdefault("request_id", f"r{number}")
    return Reserve(SequenceId(number), len(tokens), max_len or len(tokens), **options)


def play(ledger: Ledger, **columns: Any) -> GrantBatch | None:
    """Apply a report, check the ledger's state, schedule, check again, and return the batch."""
    ledger.apply_report(Report(**columns))
    ledger.check_invariants()
    batch = ledger.schedule()
    ledger.check_invariants()
    return batch


def admit(ledger: Ledger, *reserves: Reserve) -> tuple[Admit, ...]:
    """Reserve and return what was admitted at once."""
    batch = play(ledger, reserve=reserves)
    return batch.admit if batch else ()


def seal(ledger: Ledger, number: int, block_hashes: Sequence[BlockHash]) -> None:
    """Report the leading blocks of a sequence as computed and sealed."""
    table = ledger.block_table(SequenceId(number))
    assert table is not None
    play(ledger, seal=tuple(zip(table.block_ids, block_hashes, strict=False)))


def finish(ledger: Ledger, *numbers: int) -> GrantBatch | None:
    """Report sequences as finished."""
    return play(ledger, finished=tuple((SequenceId(number), FinishReason.STOP) for number in numbers))


def run_through(ledger: Ledger, number: int, tokens: Sequence[int], block_size: int = 16) -> Admit:
    """Admit a prompt, seal its full blocks, finish it, and return how it was admitted."""
    admitted = admit(ledger, reserve(number, tokens, block_size=block_size))
    seal(ledger, number, hashes(tokens, block_size))
    finish(ledger, number)
    return admitted[0]


def block_table(ledger: Ledger, number: int) -> tuple[BlockId, ...]:
    """Return the block table of a live sequence."""
    table = ledger.block_table(SequenceId(number))
    assert table is not None
    return table.block_ids


def copies(ledger: Ledger) -> dict[BlockHash, list[BlockId]]:
    """Return the blocks of every registered hash."""
    return {key: ledger.state.store.cache.copies_of(key) for key in ledger.state.store.cache.entries}


def depths(ledger: Ledger) -> dict[BlockHash, int]:
    """Return the depth of every hash that a block, a frame of the host tier or one on disk has."""
    store, below = ledger.state.store, dict[BlockHash, int]()
    for tier in (store.tier, store.disk):
        if tier is not None:
            below |= {key: tier.frames.index[at] for key, at in tier.entries.items()}
    return below | {key: store.blocks.index[block] for key, block in store.cache.entries.items()}


def free_order(ledger: Ledger) -> list[int]:
    """Return blocks in the order in which they would be granted: free ones, then cached ones."""
    return [*ledger.state.store.pool.free, *ledger.state.store.pool.cached]


def lived(ledger: Ledger, number: int, tokens: Sequence[int], **options: Any) -> None:
    """Let a prompt be computed behind its hits, a block a step, and end; blocks that leave the window are released."""
    config = ledger.state.config
    size, keys = config.block_size, hashes(tokens, config.block_size)
    (granted,) = admit(ledger, reserve(number, tokens, block_size=size, **options))
    for index, key in list(enumerate(keys))[granted.n_shared :]:
        if index == len(block_table(ledger, number)):
            play(ledger, lease_want=1)
            leased = [block for block, of in enumerate(ledger.state.store.blocks.state) if of.value == "leased"]
            play(ledger, bind=((number, BlockId(leased[0])),))
        gone = config.unread_blocks(index + 1)
        play(ledger, seal=((block_table(ledger, number)[index], key),), trim=((number, gone),))
    finish(ledger, number)
