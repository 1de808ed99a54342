"""The runway policy: how many blocks the worker leases ahead of need. Safety does not depend on it.

The worker reports how many blocks its running sequences will bind within the next `runway_slots` slots. That many are
leased, from free blocks and then by evicting; up to `runway_reach` slots more come from free blocks alone, and only
while no sequence waits for blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.core.config import LedgerConfig


@dataclass(frozen=True, slots=True)
class RunwayTerms:
    """`want` blocks are leased even by evicting cached ones; up to `reach` from free blocks alone."""

    want: int
    reach: int


def runway_terms(config: LedgerConfig, lease_want: int, stalled: int, growth: int, running: int) -> RunwayTerms:
    """Return the bounds of the lease pool.

    At least the number of stalled sequences, at most `growth`, the blocks by which all running sequences may still
    grow: so a request that needs the whole pool can run alone.
    """
    want = min(max(lease_want, stalled), growth)
    further = running * (config.runway_reach - config.runway_slots) // config.block_size
    return RunwayTerms(want, min(growth, want + further))


def next_target(terms: RunwayTerms, last_sent: int | None, refill: bool, pressed: bool) -> int:
    """Return the lease target. The last sent target stays while it is within bounds, which saves messages.

    With `pressed` (a sequence waits for blocks), nothing beyond `want` is kept. A `refill` goes up to the reach.
    """
    reach = terms.want if pressed else terms.reach
    if last_sent is not None and not refill and terms.want <= last_sent <= reach:
        return last_sent
    return reach
