"""When a ledger should grant blocks: what does not count as standing still."""

from __future__ import annotations

from kvmanager.core.counts import PoolCounts


def waits_for_a_grant(pool: PoolCounts) -> str:
    """Return in words which sequences wait for blocks that are free; "" where nothing waits, or something explains it.

    Sequences that run give blocks back; a preempted one does as soon as its worker reports it.
    """
    free = pool.free + pool.cached
    if not pool.waiting or pool.running or pool.preempting or not free:
        return ""
    return f"{pool.waiting} sequences wait, none runs, {free} of {pool.num_blocks} blocks are free and none was granted"
