"""No episode ends with somebody who waits for nothing that can end, and blocks are granted in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.suites.protocol.liveness import Episode, Run, episode, episode_in_groups
from tests.suites.protocol.promises import keep_promises

pytestmark = pytest.mark.usefixtures("worlds_without_cycles")


def serve(seeds: range, episode_of: Callable[[int], Episode] = episode) -> Counter[str]:
    """Serve the episodes of these seeds to their ends, and return what they covered."""
    covered = Counter[str]()
    for seed in seeds:
        try:
            covered.update(asdict(Run(episode_of(seed)).to_its_end()))
        except Exception as failure:
            failure.add_note(f"seed {seed}: {episode_of(seed)}")
            raise
    return covered


def test_episodes_end_and_cover_what_hung_before() -> None:
    covered = serve(range(100))
    # A higher priority waits while a begun prompt lacks blocks, and old sequences have their turns.
    assert all(covered[name] > 20 for name in ("chunked_grants", "by_age", "outranked", "preemptions", "passed")), (
        covered
    )


def test_episodes_in_groups_end() -> None:
    covered = serve(range(40), episode_in_groups)
    assert all(covered[name] > 5 for name in ("by_age", "preemptions", "chunked_grants", "passed")), covered


def keep(seeds: range) -> Counter[str]:
    covered = Counter[str]()
    for seed in seeds:
        covered.update(asdict(keep_promises(seed)))
    return covered


def test_promises_are_kept_where_others_pass_in_groups() -> None:
    covered = keep(range(30))
    assert all(covered[name] > 5 for name in ("chunked_grants", "passed")), covered


@pytest.mark.rest
def test_many_more_promises_are_kept() -> None:
    keep(range(30, 300))


@pytest.mark.rest
def test_more_episodes_in_groups_end() -> None:
    serve(range(500, 600), episode_in_groups)


@pytest.mark.rest
@pytest.mark.parametrize("first", [500, 750])
def test_more_episodes_end(first: int) -> None:
    serve(range(first, first + 250))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_very_many_episodes_end() -> None:
    serve(range(10_000, 20_000))
    serve(range(10_000, 15_000), episode_in_groups)
