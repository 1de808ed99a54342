"""Named policies: what each changes, several at once, and those that nobody knows."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("names", ["", "fastest", "lru+", "+lru", "lru round-robin"])
def test_an_unknown_policy_is_refused_with_those_that_there_are(names: str) -> None:
    with pytest.raises(InvalidConfig, match=r"expected cost, .*no-prefix-caching"):
        with_policies(ReplayOptions(), names)
