"""Where sequences leave checkpoints of their states, who gets a tail, and who waits for a planned checkpoint.

What is left, or is loaded from host memory, enters the tree of checkpoints here.
"""

from __future__ import annotations

from typing import Final

from common.contracts.hashing import key_of
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY
from common.contracts.types import BlockHash, BlockId
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger_state import LedgerState

_MOST: Final = 6
"""Checkpoints that one admission gives at most: a request of Anthropic's Messages API marks four places."""


def choose_places(
    config: LedgerConfig, sequence: Sequence, shared: int, left: int, sealed: int
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return where a sequence leaves checkpoints behind `shared` blocks, as far as `left` pages are left over.

    One stands at the last boundary before the prompt's last token, where the next turn of a chat goes on. Another one
    stands where the `sealed` K and V of others end: they share what is before it, and no state was there. Others stand
    where ranges of its retention end, such as up to a mark `cache_control`; a router says so of the first message of a
    chat, with the priority of all other blocks. That one and the one where others part are never superseded: they are
    returned a second time.
    """
    if not config.prefix_caching or not sequence.cacheable:
        return (), frozenset()
    last = min(config.hits_of(sequence.num_tokens), len(sequence.block_hashes))
    parting = min(sealed, last)
    marked = [each.end for each in sequence.retention if each.priority >= DEFAULT_RETENTION_PRIORITY]
    first = [each.end for each in sequence.retention if each.priority == DEFAULT_RETENTION_PRIORITY]
    boundaries = dict.fromkeys((last, parting, *marked))
    wanted = [boundary for boundary in boundaries if shared < boundary <= last][:_MOST]
    room = max(0, (left - config.stall_pages) // config.groups[-1].pages)
    places = tuple(sorted(boundary - 1 for boundary in wanted[:room]))
    return places, frozenset([place for place in places if place + 1 in (parting, *first)])


def gives_tail(state: LedgerState, sequence: Sequence, fresh: int, left: int) -> bool:
    """Return whether a sequence that gets so many fresh pages, with so many left, gets a tail: if it fits.

    The sequence must be able to fill a block behind its prompt's. Nobody gives a tail up before it leaves. So all that
    run and the sequence must fit beside it at their greatest lengths, and all tails take a bounded part of the pool.
    The room is that of free pages; where tails pay, it may be that of cached contents.
    """
    config, states, pool, sequences = state.config, state.store.states, state.store.pool, state.sequences
    if states is None or not config.prefix_caching or not sequence.cacheable:
        return False
    size, last = config.groups[-1].pages, config.hits_of(sequence.num_tokens)
    if config.hits_of(sequence.max_len) <= last or left - config.stall_pages < size:
        return False
    tails = 1 + sum([each.has_tail for each in sequences.live.values()])
    if (
        tails * size > config.num_blocks * config.tail_share
        or sequences.growth + sequence.growth + size > pool.available
    ):
        return False
    free = len(pool.free) - fresh - max(config.stall_pages, config.watermark_blocks)
    return free >= size or states.tail_takes_room()


def find_planned(state: LedgerState, sequence: Sequence) -> int | None:
    """Return the place of the deepest planned checkpoint that a sequence may wait for; None: there is none."""
    if sequence.awaited or not sequence.takes_hits:
        return None
    most = min(state.config.hits_of(sequence.num_tokens), len(sequence.block_hashes))
    return state.sequences.planned.deepest(sequence.block_hashes, 0, most)


def is_worth_waiting(config: LedgerConfig, place: int, hits: int) -> bool:
    """Return whether a checkpoint at a place saves enough to a sequence that shares so many blocks already."""
    return (place + 1 - hits) * config.block_size > config.least_saved


def enter_checkpoint(
    state: LedgerState, block: BlockId, block_hash: BlockHash, is_tail: bool = False
) -> BlockId | None:
    """Enter a checkpoint that is about to be registered behind the last one of its chain, and return that one's block.

    None: there is none, or the block is no checkpoint.
    """
    store, place = state.store, state.store.blocks.index[block]
    if store.states is None or not store.is_checkpoint(block):
        return None
    owner = state.sequences.live.get(store.blocks.owner[block])
    before = owner.block_hashes[:place] if owner is not None else []
    above = next((each for each in reversed(before) if each in store.states), None)
    asked = owner is not None and place in owner.runs[store.states.group - 1].asked
    state.sequences.end_planned(block_hash)
    store.states.add(block_hash, above, asked, is_tail)
    return None if above is None else store.cache.entries[key_of(above, store.states.group)]
