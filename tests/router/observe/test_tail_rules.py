"""Which requests are kept: each rule alone, ordinary requests, and the bounds of the objective."""

from __future__ import annotations

from typing import Any

import pytest

from router.observe.diagnosis.outcome import Outcome
from router.observe.tail_rules import Objective, Rule, rules_for

ORDINARY: dict[str, Any] = {"ended": "length", "before": (("prefill", 0.5),), "has_first_token": True, "gaps": 200}
PROMISED = Objective(ttft=0.5, itl=0.1)


def rules(objective: Objective = PROMISED, **changed: Any) -> set[Rule]:
    return set(rules_for(Outcome(**{**ORDINARY, **changed}), objective))


def test_an_ordinary_request_is_not_kept() -> None:
    assert rules() == set()
    assert rules(ended="stop", late_gaps=2, longest_gap=9.0) == set(), "a hundredth of the gaps may be late"


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"ended": "OVERLOADED", "failure": "1 requests wait; at most 1"}, Rule.REFUSED),
        (
            {"ended": "INVALID_ARGUMENT", "failure": "prompt and output fit no worker: needs 9 blocks; the pool has 8"},
            Rule.REFUSED,
        ),
        ({"ended": "OVERLOADED", "failure": "the client reads too slowly: 5 events wait"}, Rule.FAILED),
        (
            {"ended": "DEADLINE_EXCEEDED", "failure": "deadline exceeded"},
            Rule.FAILED,
        ),
        ({"ended": "UNAVAILABLE", "failure": "no worker"}, Rule.FAILED),
        ({"ended": "INTERNAL", "failure": "internal error"}, Rule.FAILED),
        ({"ended": "error", "failure": "a step failed"}, Rule.FAILED),
        ({"preemptions": 1}, Rule.PREEMPTED),
        ({"moves": 1}, Rule.MIGRATED),
        ({"before": (("queue", 0.3), ("prefill", 0.201))}, Rule.SLOW),
        ({"late_gaps": 3}, Rule.SLOW),
    ],
)
def test_a_rule_keeps_a_request(changed: dict[str, Any], rule: Rule) -> None:
    assert rules(**changed) == {rule}


@pytest.mark.parametrize("failure", ["the client went away", "the request was aborted by another call"])
def test_what_a_client_ends_is_no_failure_unless_it_waited_too_long(failure: str) -> None:
    assert rules(ended="CANCELLED", failure=failure) == set()
    late: dict[str, Any] = {"before": (("blocks", 0.6),), "has_first_token": False}
    assert rules(ended="CANCELLED", failure=failure, **late) == {Rule.SLOW}


def test_a_request_may_match_several_rules() -> None:
    found = rules(ended="UNAVAILABLE", failure="gone", preemptions=2, moves=3, late_gaps=200)
    assert found == {Rule.FAILED, Rule.PREEMPTED, Rule.MIGRATED, Rule.SLOW}


def test_without_a_promise_no_request_is_slow() -> None:
    slow: dict[str, Any] = {"before": (("queue", 1e6),), "late_gaps": 0, "longest_gap": 1e6}
    assert rules(Objective(), **slow) == rules(Objective.of(None, None), **slow) == set()
    assert rules(Objective.of(1.0, None), **slow) == {Rule.SLOW}
