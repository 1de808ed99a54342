"""Named policies: what each changes, several at once, and those that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.replay.links import Moves, parse_links
from cli.replay.policies import POLICIES, LeastLoaded, with_policies
from cli.replay.simulation import ReplayOptions
from common.contracts.errors import InvalidConfig


def test_joined_policies_change_one_choice_each() -> None:
    names = "least-loaded+lru+runway-max+victims-arrival+no-backfill+no-chunked-grants+no-prefix-caching"
    found = with_policies(ReplayOptions(), f"{names}+unbounded-preemptions+no-age")
    assert found.router is LeastLoaded
    assert (found.manager.eviction, found.manager.runway, found.manager.backfill) == ("lru", "max", False)
    assert (found.manager.preemption, found.manager.max_preemptions, found.manager.max_wait) == ("arrival", 0, 0.0)
    assert not found.manager.chunked_grants
    assert not found.prefix_caching


def test_each_policy_has_an_opposite_that_changes_it_back() -> None:
    back = "cost+utility+runway-auto+victims-work+bounded-preemptions+backfill+age+chunked-grants+prefix-caching"
    back += "+no-transfers"
    for name in POLICIES:
        assert with_policies(with_policies(ReplayOptions(), name), back) == ReplayOptions()


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        ("backfill+no-backfill", "backfill", "no-backfill"),
        ("lru+runway-max+utility", "lru", "utility"),
        ("cost+round-robin", "cost", "round-robin"),
        ("runway-max+lru+runway-auto", "runway-max", "runway-auto"),
        ("age+no-age", "age", "no-age"),
        ("bounded-preemptions+lru+unbounded-preemptions", "bounded-preemptions", "unbounded-preemptions"),
        ("no-prefix-caching+prefix-caching", "no-prefix-caching", "prefix-caching"),
        ("tier-2x+transfers", "tier-2x", "transfers"),
        ("lru+lru", "lru", "lru"),
    ],
)
def test_two_policies_for_one_choice_are_refused_in_a_line(names: str, first: str, second: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        with_policies(ReplayOptions(), names)
    assert str(caught.value).endswith(
        f"--policy: is {names!r}, where {first} and {second} are for the same choice; leave one of them out"
    )
    assert "\n" not in str(caught.value)


def test_host_memory_is_twice_the_pool_and_keeps_the_rates_that_are_given() -> None:
    rates = parse_links("peer=3GB/s")
    pool = ReplayOptions(num_blocks=100)
    assert with_policies(pool, "tier-2x").moves == Moves(200)
    given = replace(pool, moves=Moves(7, 9, peers=False, rates=rates))
    assert with_policies(given, "transfers").moves == Moves(200, 0, peers=True, rates=rates)
    assert with_policies(given, "no-transfers").moves is None


def test_no_host_memory_where_layers_have_windows() -> None:
    with pytest.raises(InvalidConfig, match="every layer has a window; leave out tier-2x and transfers"):
        with_policies(ReplayOptions(window=64), "tier-2x")


@pytest.mark.parametrize("names", ["", "fastest", "lru+", "+lru", "lru round-robin"])
def test_an_unknown_policy_is_refused_with_those_that_there_are(names: str) -> None:
    with pytest.raises(InvalidConfig, match=r"expected cost, .*no-prefix-caching"):
        with_policies(ReplayOptions(), names)
