"""Which tenants hold more batch slots than their share, and which may have one although the workers are full.

A queue that is fair orders requests, but long ones keep their slots. Shares therefore count slots in use. A tenant's
share of all slots is its weight over the weights of all tenants that hold slots or wait.

Requests take slots as a whole, so a tenant seldom holds its exact share at one moment, but may do so over time.
Two questions differ in that:

    exceeded_by   may a request have slots that others hold?  Only within its tenant's share, or as the first one.
    is_over       do the others go first?  Only if it has its share, as much as the largest request that waits wants,
                  and one slot more if its share is larger than that request. Until then the queue's own order gives
                  sequences by weight. To keep each tenant as near to its share as whole requests allow gave one of a
                  tenth of the weight twice its part.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.placement.fair_queue import Flow, Ticket

_LEAST_WEIGHT = 1e-9
# Shares are fractions: a sum of them may miss a whole number by this much.
_ROUNDING = 1e-6


class SlotShares:
    """Counts the sequences of each tenant at workers."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._flows: dict[str, Flow] = {}

    def used(self, flow: Flow) -> int:
        return self._used.get(flow.tenant, 0)

    def others(self, flow: Flow) -> list[Flow]:
        """Return the other tenants that hold slots."""
        return [each for each in self._flows.values() if each.tenant != flow.tenant]

    def take_slot(self, flow: Flow) -> None:
        """Count one more sequence."""
        self._used[flow.tenant] = self.used(flow) + 1
        self._flows[flow.tenant] = flow

    def release_slot(self, flow: Flow) -> None:
        """Count one sequence less."""
        left = self.used(flow) - 1
        if left:
            self._used[flow.tenant] = left
        else:
            del self._used[flow.tenant], self._flows[flow.tenant]

    def among(self, slots: int, waiting: Iterable[Flow]) -> Shares:
        """Return the shares of so many slots while these tenants wait."""
        active = self._flows | {flow.tenant: flow for flow in waiting}
        return Shares(self, slots / max(sum(flow.weight for flow in active.values()), _LEAST_WEIGHT))


class Shares:
    """The shares at one moment; `each` is slots for each unit of weight."""

    __slots__ = ("_counts", "_each")

    def __init__(self, counts: SlotShares, each: float) -> None:
        self._counts, self._each = counts, each

    def load(self, flow: Flow) -> float:
        """Return the slots of a tenant over its share of them: 1 is exactly the share."""
        return round(self._counts.used(flow) / max(self._each * flow.weight, _LEAST_WEIGHT), 6)

    def is_over(self, flow: Flow, largest: int) -> bool:
        """Return whether others go before a tenant while requests of up to so many sequences wait."""
        share = self._each * flow.weight
        beside = min(largest + 1.0, max(float(largest), share))
        return self._counts.used(flow) >= share + beside - _ROUNDING

    def is_within(self, ticket: Ticket) -> bool:
        """Return whether a tenant holds no more than its share with this request too."""
        share = self._each * ticket.flow.weight
        return self._counts.used(ticket.flow) + ticket.sequences <= share + _ROUNDING

    def exceeded_by(self, ticket: Ticket) -> bool:
        """Return whether a tenant that holds slots would hold more than its share; the first slot is always its own."""
        return self._counts.used(ticket.flow) > 0 and not self.is_within(ticket)

    def exceeded_beside(self, flow: Flow) -> bool:
        """Return whether another tenant holds more than its share: a tenant below its own may take from that."""
        return any(self._counts.used(each) > self._each * each.weight + _ROUNDING for each in self._counts.others(flow))
