"""Every state of tiny worlds, breadth first: all invariants hold in each, and the world comes to rest from each."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.suites.protocol.scenarios import TINY
from tests.suites.protocol.search import exhaust
from tests.suites.protocol.transfer_mutants import read_nothing_in_time
from tests.suites.protocol.transfer_side import TransferSide

pytestmark = pytest.mark.usefixtures("worlds_without_cycles")

ENOUGH = 100_000
"""More states than a small world has."""

FIRST = 1_500
"""States of a wider world that the quick search expands."""

QUICK = (
    *("peace", "cancel_nested", "nested_senior", "worker_crash", "manager_crash", "fork", "tenants"),
    *("window_reuse", "window_full_reuse", "chunk", "compound", "three"),
    *("state", "state_together", "state_tight"),
    *("ahead_stale", "ahead_window_reset", "disk_warm_state", "disk_warm_compound", "peers_window_reset"),
)
SMALL = (
    *("break", "break_stop", "reset", "hand_over"),
    *("window_full", "window_full_break", "compound_break", "compound_pressure"),
    *("state_break", "state_break_reuse", "state_window", "state_drafts"),
    *("frames", "ahead"),
)
WIDE = tuple(name for name in TINY if name not in (*QUICK, *SMALL))
LATE = ("disk", "disk_rots", "disk_reset")
"""What is searched in them begins behind more states than the quick search expands; `disk_warm` and its like are."""
WIDEST = "parts_aged"
"""It has more than a million states. Its first ones are searched, and `liveness.py` has many like it."""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SMALL)])
def test_no_state_of_a_small_world_violates_an_invariant(name: str) -> None:
    found = exhaust(TINY[name], ENOUGH)
    assert found.violation is None, found.trace
    assert found.complete, "the world has grown: it is no longer searched to its end"


@pytest.mark.rest
@pytest.mark.parametrize("name", [name for name in (*SMALL, *WIDE) if name not in LATE])
def test_no_early_state_of_a_wider_world_violates_an_invariant(name: str) -> None:
    found = exhaust(TINY[name], 2 * FIRST)
    assert found.violation is None, found.trace
    assert found.states > FIRST


@pytest.mark.rest
def test_a_disk_that_answers_nothing_in_time_hinders_nobody() -> None:
    with mock.patch.object(TransferSide, "read", read_nothing_in_time):
        found = exhaust(TINY["disk_warm"], ENOUGH, peace_every=5)
    assert found.violation is None, found.trace
    assert found.complete


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in WIDE if name != WIDEST])
def test_no_state_of_a_wider_world_violates_an_invariant(name: str) -> None:
    found = exhaust(TINY[name])
    assert found.violation is None, found.trace
    assert found.complete
