"""Moves at drain: no token is lost or computed twice, and every place is given back, whatever dies meanwhile."""

from __future__ import annotations

import pytest

from tests.suites.protocol.drain.mutants import MUTANTS
from tests.suites.protocol.drain.search import CROWDS, DRAINS, MoveWalks, exhaust
from tests.suites.protocol.mutant import Mutant, Search

QUICK = ("unread",)
"""Worlds whose states are visited all in seconds."""


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.rest) for each in DRAINS]
)
def test_no_state_of_a_small_world_violates_an_invariant(name: str) -> None:
    found = exhaust(DRAINS[name])
    assert found.violation is None, found.trace
    assert found.complete


@pytest.mark.parametrize("walks", [6, pytest.param(40, marks=pytest.mark.rest)])
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
def test_the_search_kills_the_mutant(mutant: Mutant) -> None:
    found = mutant.run()
    assert found.killed_by in mutant.dies_by, f"it died by {found.violation}" if found.violation else "it survived"


@pytest.mark.rest
@pytest.mark.parametrize("search", dict.fromkeys(mutant.search for mutant in MUTANTS), ids=str)
def test_the_same_search_finds_nothing_in_the_real_rules(search: Search) -> None:
    found = search.shortened().run()
    assert found.violation is None, found.trace
