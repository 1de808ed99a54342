"""Long random walks with up to twelve faults each; afterwards the faults stop and every request must end."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.suites.protocol import content
from tests.suites.protocol.manager_rules import EVICTING_AHEAD
from tests.suites.protocol.mutant import Walks
from tests.suites.protocol.scenarios import ALL_FAULTS, LARGE, RESETS, in_any_groups
from tests.suites.protocol.search import Pace, walk
from tests.suites.protocol.world import World

pytestmark = pytest.mark.usefixtures("worlds_without_cycles")

POLICIES = ("lru", "frequency", "utility")
MORE_SHAPES = tuple(range(first, first + 60) for first in range(45, 165, 60))
PACES = (Pace(150, 0.03), Pace(250, 0.06), Pace(350, 0.1))


def test_what_a_request_draws_does_not_depend_on_what_the_process_met_before() -> None:
    """Nodes are numbered as they come, so a walk's seed says nothing unless draws ignore these numbers."""
    assert content.draw(content.path((1, 0, 1, 1))[-1]) == 0x36C5BD3F


def walk_many(name: str, first_seed: int, walks: int) -> None:
    for pace in PACES:
        found = Walks(name, first_seed, walks, (*ALL_FAULTS, *RESETS), pace).run()
        assert found.violation is None, f"seed {found.seed}, {pace}: {found.violation}\n{found.trace}"


@pytest.mark.parametrize(("first_seed", "walks"), [(0, 4), pytest.param(4, 6, marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", LARGE)
def test_walks_violate_nothing_and_end_in_peace(name: str, first_seed: int, walks: int) -> None:
    walk_many(name, first_seed, walks)


@pytest.mark.parametrize("seeds", [range(45), *(pytest.param(each, marks=pytest.mark.rest) for each in MORE_SHAPES)])
def test_walks_in_groups_of_any_shape(seeds: range) -> None:
    for seed in seeds:
        with mock.patch.object(World, "eviction", POLICIES[seed % len(POLICIES)]):
            found = walk(in_any_groups(seed), seed, PACES[1])
        assert found.violation is None, f"seed {seed}: {found.violation}\n{found.trace}"


@pytest.mark.rest
def test_a_manager_that_evicts_ahead_and_grants_in_another_order_does_no_harm() -> None:
    patches = [mock.patch.object(*patch) for patch in EVICTING_AHEAD]
    for patch in patches:
        patch.start()
    try:
        walk_many("mixed", first_seed=0, walks=3)
        walk_many("tight", first_seed=0, walks=3)
        walk_many("compound_mixed", first_seed=0, walks=3)
        walk_many("three", first_seed=0, walks=3)
        walk_many("state_mixed", first_seed=0, walks=3)
        walk_many("state_window_mixed", first_seed=0, walks=3)
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.rest
@pytest.mark.parametrize("policy", ["frequency", "utility"])
@pytest.mark.parametrize("name", ["mixed", "tight", "compound_mixed", "three", "three_tenants", "state_tight"])
def test_walks_under_other_policies_of_eviction(policy: str, name: str) -> None:
    with mock.patch.object(World, "eviction", policy):
        walk_many(name, first_seed=0, walks=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_many_more_walks_violate_nothing(name: str) -> None:
    walk_many(name, first_seed=1_000, walks=500)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_walks_in_many_more_groups() -> None:
    test_walks_in_groups_of_any_shape(range(1_000, 2_000))
