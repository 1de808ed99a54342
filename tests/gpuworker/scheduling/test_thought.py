"""When a thought is ended by force, and with which tokens: over any cut of the marks into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.contracts.types import ThoughtBudget
from gpuworker.scheduling.thought import ThoughtFollower

# Tokens of this test are texts; END is what ends a thought by force.
TEXTS = ["<think>", "</think>", "<", "think>", "/think>", " ", "\n", "a", "<thi", "nk>b", "a</think>c", "[x]"]
IDS = {text: number for number, text in enumerate(TEXTS)}
END = (IDS["\n"], IDS["</think>"], IDS["\n"])


def budget(max_tokens: int, **fields: bool) -> ThoughtBudget:
    return ThoughtBudget(max_tokens, "<think>", "</think>", END, **fields)


def forced_after(texts: Sequence[str], given: ThoughtBudget) -> int | None:
    follower = ThoughtFollower(given, lambda token: TEXTS[token].encode())
    for text in texts:
        follower.take(IDS[text])
    return follower.forced


@pytest.mark.parametrize("opening", [["<think>"], ["<", "think>"], [" ", "\n", "<think>"], ["<thi", "nk>b"]])
def test_the_end_is_forced_once_the_budget_is_spent(opening: list[str]) -> None:
    assert forced_after(opening, budget(2)) is None
    assert forced_after([*opening, "a"], budget(2)) is None
    assert forced_after([*opening, "a", "a"], budget(2)) == END[0]


def test_the_whole_end_is_forced_and_nothing_after_it() -> None:
    begun = ["<think>", "a"]
    for place, token in enumerate(END):
        assert forced_after([*begun, *(TEXTS[each] for each in END[:place])], budget(1)) == token
    whole = [*begun, *(TEXTS[each] for each in END)]
    assert forced_after([*whole, "<think>", "a", "a"], budget(1)) is None


def test_a_budget_of_none_ends_a_thought_where_it_begins() -> None:
    assert forced_after([], budget(0)) is None
    assert forced_after(["<think>"], budget(0)) == END[0]
    assert forced_after([], budget(0, is_open=True)) == END[0]


@pytest.mark.parametrize("closing", [["</think>"], ["<", "/think>"], ["a</think>c"]])
def test_a_thought_that_ends_by_itself_is_left_alone(closing: list[str]) -> None:
    assert forced_after(["a", *closing, "a", "a", "a"], budget(3, is_open=True)) is None


@pytest.mark.parametrize("first", ["a", "[x]", "</think>"])
def test_an_answer_without_a_thought_has_no_limit(first: str) -> None:
    assert forced_after([first, "<think>", "a", "a", "a"], budget(1)) is None


def test_an_open_thought_counts_from_the_first_token() -> None:
    assert forced_after(["a"], budget(2, is_open=True)) is None
    assert forced_after(["a", "a"], budget(2, is_open=True)) == END[0]


def test_thoughts_anywhere_count_together() -> None:
    given = budget(3, anywhere=True)
    first = ["a", "<think>", "a", "</think>", "a"]
    assert forced_after([*first, "<", "think>"], given) is None
    assert forced_after([*first, "<", "think>", "a"], given) == END[0]
    whole = [*first, "<think>", "a", *(TEXTS[each] for each in END)]
    assert forced_after([*whole, "a"], given) is None
    assert forced_after([*whole, "<think>"], given) == END[0]


def test_a_sequence_that_begins_again_goes_on_as_it_would_have() -> None:
    follower = ThoughtFollower(budget(2), lambda token: TEXTS[token].encode())
    output: list[int] = []
    for text in ["<", "think>", "a", "a", *(TEXTS[each] for each in END), "a"]:
        again = ThoughtFollower(budget(2), lambda token: TEXTS[token].encode())
        for token in output:
            again.take(token)
        assert again.forced == follower.forced
        output.append(IDS[text])
        follower.take(IDS[text])
