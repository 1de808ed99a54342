"""Which part of all sequences each tenant gets while all of them always wait: by weight, whatever their requests are.

The real queue and the real shares of slots serve a pure loop: a request gets its slots where they are free, or where
its tenant is entitled to those of others, and each sequence keeps its place for a time that is drawn beforehand.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.contracts.clock import ManualClock
from router.placement.fair_queue import FairQueue, Flow, Ticket
from router.placement.placement_request import ENTITLED
from router.placement.slot_shares import Shares, SlotShares

WEIGHTS = ((1.0, 1.9), (1.0, 3.0), (2.0, 3.0, 5.0), (0.1, 1.0), (1.0, 10.0))
# Sequences of a request, of the first tenant and of the others: from, to.
MIXES = {
    "1": ((1, 1), (1, 1)),
    "2": ((2, 2), (2, 2)),
    "1 to 8": ((1, 8), (1, 8)),
    "4 and 1": ((4, 4), (1, 1)),
    "1 and 4": ((1, 1), (4, 4)),
}
NEAR = 0.05
# Sequences of the largest request.
MOST = 8


class Service:
    """Places, and tenants that always have requests in the queue."""

    def __init__(
        self,
        weights: Sequence[float],
        sizes: Sequence[tuple[int, int]],
        slots: int,
        seed: int = 1,
        seconds: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        max_wait: float = 0.0,
    ) -> None:
        """`sizes` are the fewest and the most sequences of a request, `seconds` the mean of a sequence, by tenant.

        With a `max_wait` of 0 nobody goes by age.
        """
        self.flows = [Flow(str(number), weight) for number, weight in enumerate(weights)]
        self.sizes, self.seconds = sizes, seconds
        self.slots, self.rng, self.now = slots, random.Random(seed), 0.0
        self.clock = ManualClock()
        self.queue, self.counts = FairQueue[int](self.clock, max_wait), SlotShares()
        self.running: list[tuple[float, int]] = []
        self.served, self.most = [0] * len(weights), [0] * len(weights)

    def ask(self, tenant: int) -> None:
        self.queue.join_queue(self.queue.ticket(0, self.flows[tenant], self.rng.randint(*self.sizes[tenant])), tenant)

    def serve(self) -> bool:
        """Give the head its slots, or who passes it; return False when both have to wait."""
        shares = self.counts.among(self.slots, self.queue.flows())
        entry = self.queue.head(shares)
        if self.attempt(entry, shares):
            return True
        passing = self.queue.passing(entry[0], shares)
        return passing is not None and self.attempt(passing, shares)

    def attempt(self, entry: tuple[Ticket, int], shares: Shares) -> bool:
        ticket, tenant = entry
        limit = self.slots * (1 if shares.exceeded_by(ticket) else ENTITLED)
        if len(self.running) + ticket.sequences > max(limit, ticket.sequences):
            return False
        self.queue.serve_ticket(ticket)
        self.ask(tenant)
        for _ in range(ticket.sequences):
            heapq.heappush(self.running, (self.now + self.seconds[tenant] * self.rng.expovariate(1.0), tenant))
            self.counts.take_slot(self.flows[tenant])
        self.served[tenant] += ticket.sequences
        self.most[tenant] = max(self.most[tenant], self.counts.used(self.flows[tenant]))
        return True

    def run(self, sequences: int) -> None:
        """Serve so many sequences."""
        for tenant in range(len(self.flows)):
            for _ in range(3):
                self.ask(tenant)
        while sum(self.served) < sequences:
            if not self.serve():
                self.now, tenant = heapq.heappop(self.running)
                self.clock.now = self.now
                self.counts.release_slot(self.flows[tenant])

    def entitled(self) -> list[float]:
        """Return the sequences of each tenant by its weight."""
        weights = sum(flow.weight for flow in self.flows)
        return [sum(self.served) * flow.weight / weights for flow in self.flows]


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_each_tenant_gets_sequences_by_its_weight(weights: tuple[float, ...], mix: str, slots: int) -> None:
    first, others = MIXES[mix]
    service = Service(weights, [first, *[others] * (len(weights) - 1)], slots)
    service.run(6_000)
    assert service.served == pytest.approx(service.entitled(), rel=NEAR)


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize(("light", "sequences"), [(9.0, 16), (3.0, 16), (19.0, 1)])
def test_turns_by_age_leave_the_weights(light: float, sequences: int, slots: int) -> None:
    """Everybody is old. Age may add to a tenant of few slots, and not by the size of its requests."""
    service = Service((1.0, light), ((sequences, sequences), (1, 1)), slots, max_wait=1e-9)
    service.run(6_000)
    share = service.served[0] / sum(service.served)
    assert share == pytest.approx(1.0 / (1.0 + light), abs=0.02)


sizes = st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 4), (1, 8), (8, 8)])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), sizes), min_size=2, max_size=4), st.integers(16, 64), st.integers(0, 99)
)
@example([(0.1, (8, 8)), (1.0, (1, 1))], 16, 1)
def test_any_mix_gets_sequences_by_weight(tenants: list[tuple[float, tuple[int, int]]], slots: int, seed: int) -> None:
    """Beside one in twenty, a few requests: so many may be over at the end."""
    service = Service([weight for weight, _ in tenants], [size for _, size in tenants], slots, seed)
    service.run(3_000)
    for got, entitled in zip(service.served, service.entitled(), strict=True):
        assert abs(got - entitled) <= NEAR * entitled + 4 * MOST


def test_a_tenant_of_long_requests_does_not_keep_the_places_of_others() -> None:
    """By sequences alone it would hold ten of eleven. It has its half, one request, and what tenants stray by."""
    service = Service([1.0, 1.0], [(1, 1), (1, 1)], 16, seconds=[10.0, 1.0])
    service.run(6_000)
    assert 8 < service.most[0] <= 8 + 1 + 1
    assert service.served[1] > 5 * service.served[0]
