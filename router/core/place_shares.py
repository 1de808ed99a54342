"""Which tenants hold more places at workers than their share, and which may have one although the workers are full.

A queue that is fair orders requests, but long ones keep their places. Shares therefore count places in use. A tenant's
share of all places is its weight over the weights of all tenants that hold places or wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.core.fair_queue import Flow, Ticket


class PlaceShares:
    """Counts the sequences of each tenant at workers."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._flows: dict[str, Flow] = {}

    def used(self, flow: Flow) -> int:
        return self._used.get(flow.tenant, 0)

    def others(self, flow: Flow) -> list[Flow]:
        """Return the other tenants that hold places."""
        return [each for each in self._flows.values() if each.tenant != flow.tenant]

    def take(self, flow: Flow) -> None:
        """Count one more sequence."""
        self._used[flow.tenant] = self.used(flow) + 1
        self._flows[flow.tenant] = flow

    def release(self, flow: Flow) -> None:
        """Count one sequence less."""
        left = self.used(flow) - 1
        if left:
            self._used[flow.tenant] = left
        else:
            del self._used[flow.tenant], self._flows[flow.tenant]

    def among(self, places: int, waiting: Iterable[Flow]) -> Shares:
        """Return the shares of so many places while these tenants wait."""
        active = self._flows | {flow.tenant: flow for flow in waiting}
        return Shares(self, places / max(sum(flow.weight for flow in active.values()), 1e-9))


class Shares:
    """The shares at one moment; `each` is places for each unit of weight."""

    __slots__ = ("_counts", "_each")

    def __init__(self, counts: PlaceShares, each: float) -> None:
        self._counts, self._each = counts, each

    def exceeded_by(self, ticket: Ticket) -> bool:
        """Return whether a tenant that holds places would hold more than its share; the first place is always its."""
        used = self._counts.used(ticket.flow)
        return used > 0 and used + ticket.sequences > self._each * ticket.flow.weight

    def exceeded_beside(self, flow: Flow) -> bool:
        """Return whether another tenant holds more than its share: a tenant below its own may take from that."""
        return any(self._counts.used(each) > self._each * each.weight for each in self._counts.others(flow))
