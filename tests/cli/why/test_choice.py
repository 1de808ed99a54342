"""Which requests a choice names, of made-up ends of requests."""

from __future__ import annotations

import pytest

from cli.why.choice import Choice, chosen, seconds_of
from common.contracts.errors import InvalidConfig
from common.contracts.types import Decision, DecisionKind
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of

S = 1_000_000_000


def ended(name: str, at_s: float, first_token_s: float = 0.1, **fields: object) -> Decision:
    outcome = Outcome(**{"ended": "length", "before": (("prefill", first_token_s),), **fields})  # type: ignore[arg-type]
    return Decision(name, DecisionKind.OUTCOME, int(at_s * S), "length", name, (), texts_of(outcome),
                    figures=figures_of(outcome))  # fmt: skip


def refused(name: str, at_s: float, chosen_: str = "router.queue") -> Decision:
    return Decision(name, DecisionKind.REJECTION, int(at_s * S), chosen_, name)


RECORDS = [
    ended("quick", 10),
    ended("slow", 20, first_token_s=3.0, miss="never_seen"),
    ended("late", 30, first_token_s=1.0, ended="DEADLINE_EXCEEDED", failure="late"),
    refused("full", 40),
    ended("victim", 50, first_token_s=0.5, preemptions=1, miss="full_hit"),
    refused("by the manager", 60, "refused"),
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (Choice(last=True), ["victim"]),
        (Choice(slowest=2), ["slow", "late"]),
        (Choice(slowest=9), ["slow", "late", "victim", "quick"]),
        (Choice(rejected=True), ["full", "late"]),
        (Choice(preempted=True), ["victim"]),
        (Choice(misses=True), ["slow"]),
        (Choice(misses=True, preempted=True), []),
        (Choice(since=45.0), ["victim", "full", "late", "slow"]),
        (Choice(since=45.0, slowest=1), ["slow"]),
        (Choice(rejected=True, last=True), ["full"]),
    ],
)
def test_a_choice_names_the_most_wanted_first(choice: Choice, names: list[str]) -> None:
    assert chosen(choice, reversed(RECORDS), 61 * S) == names


def test_of_an_id_that_was_used_twice_the_last_end_counts() -> None:
    again = [*RECORDS, refused("quick", 70)]
    assert chosen(Choice(rejected=True), again, 80 * S) == ["quick", "full", "late"]


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_spans_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 minutes", "1e9s"])
def test_other_spans_are_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expected a span of time such as 30s, 5m, 2h or 1d"):
        seconds_of(text)
