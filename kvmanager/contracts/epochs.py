"""The rules by which a manager takes an epoch, and by which it notices that another one has taken over.

Redis follows the last two in one atomic step (`kvmanager/index/acquire.lua`); a test compares both over a real
server.
"""

from __future__ import annotations

from common.contracts.lease import highest_plausible_epoch


def must_rise(own: int, seen: int, answered: bool = True) -> bool:
    """Return whether `own` (0: none yet) may not be the answer to a worker that has accepted the epoch `seen`.

    If no worker was `answered` with the own epoch, a worker that has seen that number has it from a predecessor.
    """
    return not own or seen > own or (seen == own and not answered)


def next_epoch(own: int = 0, seen: int = 0, stored: int = 0, counter: int = 0) -> int:
    """Return 1 + the highest of the own epoch, the worker's, the stored one and the counter in Redis.

    The counter in Redis alone is not enough: after a wipe, every worker would refuse its small numbers for ever.
    """
    return 1 + max(own, seen, stored, counter)


def believed(number: int | None, known: int) -> int | None:
    """Return a number in Redis, or None when no manager can have written it; `known` is the highest epoch known here.

    A number that cannot be an epoch counts as none, so the next acquisition writes over it.
    """
    return number if number is not None and 0 <= number <= highest_plausible_epoch(known) else None


def acquired(least: int, counter: int | None, fence: int | None, jump: int) -> int:
    """Return the epoch that Redis gives: at least `least`, above its counter and fence where these are plausible.

    Where there is no counter (Redis is new, or was wiped) the epoch jumps: the least number may be one that another
    manager still holds, and the fence would let both write.
    """
    counter, fence = believed(counter, least), believed(fence, least)
    epoch = max(least, next_epoch(counter=counter or 0), next_epoch(counter=fence or 0))
    return epoch + jump if counter is None else epoch


def is_replaced(held: int, fence: int | None) -> bool:
    """Return whether a manager that wrote the fence `held` (0: none) finds a higher one in its place."""
    fence = believed(fence, held)
    return held > 0 and fence is not None and fence > held
