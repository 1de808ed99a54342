"""When a ledger should grant blocks: what does not count as standing still."""

from __future__ import annotations

from kvmanager.contracts.counts import PoolCounts


def waits_for_a_grant(pool: PoolCounts) -> str:
    """Return in words which sequences wait for a grant; "" where nothing waits, or something explains it.

    Sequences that compute give blocks back. A preempted one does as soon as its worker reports it. So does what was
    leased: the worker has still to bind or to return it. Transfers end, and their worker has the time that they take.
    """
    free, waiting = pool.free + pool.cached, pool.waiting - pool.fetching
    if not waiting + pool.lacking or pool.running > pool.lacking or pool.preempting or pool.leased:
        return ""
    if not pool.running and not free:
        return ""
    runs = f"{pool.running} run and lack blocks" if pool.running else "none runs"
    blocks = f"{free} of {pool.num_blocks} {'pages' if pool.groups else 'blocks'} are free and none was granted"
    return f"{waiting} sequences wait, {runs}, {blocks}"
