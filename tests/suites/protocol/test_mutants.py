"""The search of each simpler rule finds a violation, of the invariant that the rule breaks."""

from __future__ import annotations

import pytest

from common.contracts.types import BlockHash
from kvmanager.contracts.ports import IndexCall
from tests.suites.protocol.index import Index
from tests.suites.protocol.mutant import Mutant
from tests.suites.protocol.mutants import MUTANTS

pytestmark = pytest.mark.usefixtures("worlds_without_cycles")

EVERY = 8
"""`make test` searches for each mutant of this number; the others change only with the rules."""
SEARCHED = [each if n % EVERY == 0 else pytest.param(each, marks=pytest.mark.rest) for n, each in enumerate(MUTANTS)]


@pytest.mark.parametrize("mutant", SEARCHED, ids=[f"{m.name}: {m.rule}" for m in MUTANTS])
def test_the_search_kills_the_mutant_and_not_the_real_rules(mutant: Mutant) -> None:
    found = mutant.run()
    assert found.killed_by in mutant.dies_by, f"it died by {found.violation}" if found.violation else "it survived"
    real = mutant.search.up_to(found).run()
    assert real.violation is None, f"so do the real rules: {real.trace}"


def test_a_counter_that_expires_revives_the_entries_of_its_earlier_life() -> None:
    """A generation from a counter in a key with a TTL: the key expires, the counter starts again, old entries count."""

    class Counter:
        value = 0

        def next(self) -> int:
            self.value += 1
            return self.value

    key, index, counter = BlockHash(bytes(16)), Index(fence=1), Counter()
    index.register(1, counter.next())
    index.update(1, index.generation, IndexCall(adds=(key,)))
    index.register(1, counter.next())
    assert index.live() == set(), "a new generation: what the worker held before is dead"
    counter = Counter()  # the key expired while the worker was away
    index.register(1, counter.next())
    assert index.live() == {key}, "the worker does not hold this block, and readers believe it does"
