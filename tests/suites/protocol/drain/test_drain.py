"""Moves at drain: no token is lost or computed twice, and every place is given back, whatever dies meanwhile."""

from __future__ import annotations

import pytest

from tests.suites.protocol.drain.mutants import MUTANTS
from tests.suites.protocol.drain.search import CROWDS, DRAINS, MoveWalks, exhaust
from tests.suites.protocol.mutant import Mutant

QUICK = ("unread",)
"""Worlds whose states are visited all in seconds."""
WIDE = ("alone", "crash", "lose_manager", "leave")
FIRST = 300
"""States of a wider world that .ci/run visits, the deepest first; random walks have its faults, too."""


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.rest) for each in DRAINS if each not in WIDE],
)
def test_no_state_of_a_small_world_violates_an_invariant(name: str) -> None:
    found = exhaust(DRAINS[name])
    assert found.violation is None, found.trace
    assert found.complete


@pytest.mark.rest
@pytest.mark.parametrize("name", WIDE)
def test_no_early_state_of_a_wider_world_violates_an_invariant(name: str) -> None:
    found = exhaust(DRAINS[name], FIRST)
    assert found.violation is None, found.trace
    assert found.states >= FIRST


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WIDE)
def test_no_state_of_a_wider_world_violates_an_invariant(name: str) -> None:
    found = exhaust(DRAINS[name])
    assert found.violation is None, found.trace
    assert found.complete


@pytest.mark.parametrize("walks", [4, pytest.param(12, marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", CROWDS)
def test_walks_violate_nothing_and_end_in_peace(name: str, walks: int) -> None:
    found = MoveWalks(name, walks).run()
    assert found.violation is None, f"seed {found.seed}: {found.violation}\n{found.trace}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CROWDS)
def test_many_more_walks_violate_nothing(name: str) -> None:
    found = MoveWalks(name, 2_000).run()
    assert found.violation is None, f"seed {found.seed}: {found.violation}\n{found.trace}"


@pytest.mark.rest
@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.name}: {m.rule}" for m in MUTANTS])
def test_the_search_kills_the_mutant_and_not_the_real_rules(mutant: Mutant) -> None:
    found = mutant.run()
    assert found.killed_by in mutant.dies_by, f"it died by {found.violation}" if found.violation else "it survived"
    real = mutant.search.up_to(found).run()
    assert real.violation is None, f"so do the real rules: {real.trace}"
