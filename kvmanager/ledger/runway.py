"""The runway policy: how many blocks the worker leases ahead of need. Safety does not depend on it.

The worker reports how many blocks its running sequences will bind within the next `runway_slots` slots. That many are
leased, from free blocks and then by evicting. Up to `runway_reach` slots more come from free blocks alone, and only
while no sequence waits for blocks. While one does, a third of the slots must do: the others are worth more to it.
"""

from __future__ import annotations

from typing import NamedTuple

from common.contracts.lease import RUNWAY_UNDER_PRESSURE
from kvmanager.contracts.ledger_config import LedgerConfig


class RunwayTerms(NamedTuple):
    """`want` blocks are leased even by evicting cached ones; up to `reach` from free blocks alone."""

    want: int
    reach: int


def runway_terms(
    config: LedgerConfig, lease_want: int, stalled: int, growth: int, running: int, pressed: bool = False
) -> RunwayTerms:
    """Return the bounds of the lease pool in blocks. With `pressed`, a sequence waits for blocks.

        0 ------------------ want ------------------ reach ------------------ growth
        leased by evicting   leased from free blocks alone   never leased

    At least the number of stalled sequences, at most `growth`, the blocks by which all running sequences may still
    grow: so a request that needs the whole pool can run alone.
    """
    if pressed:
        lease_want = -(-lease_want // RUNWAY_UNDER_PRESSURE)
    want = min(max(lease_want, stalled * config.stall_pages), growth)
    further = running * (config.runway_reach - config.runway_slots) // config.block_size * config.stall_pages
    return RunwayTerms(want, min(growth, want + further))


def is_short(terms: RunwayTerms, leased: int, stalled: int) -> bool:
    """Whether to lease more: a quarter of what is wanted is used up, or a stalled sequence finds no block.

    So a refill is worth its message, and three quarters of the runway are left when it is granted.
    """
    return leased < (terms.want if stalled else _enough(terms))


def _enough(terms: RunwayTerms) -> int:
    return terms.want - terms.want // 4


def next_target(terms: RunwayTerms, last_sent: int | None, refill: bool, pressed: bool, leased: int) -> int:
    """Return the lease target. The last sent target stays while it is within bounds, which saves messages.

    With `pressed` (a sequence waits for blocks), nothing beyond `want` is kept. A `refill` goes up to the reach. A
    target above the reach stays, too, while no block is to be returned and at least half of the target is leased.
    """
    reach = terms.want if pressed else terms.reach
    if last_sent is None or refill or last_sent < _enough(terms):
        return reach
    kept = last_sent <= reach or (leased <= reach and last_sent <= 2 * leased)
    return last_sent if kept else reach
