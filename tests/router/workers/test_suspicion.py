"""Who broke a worker: the request that broke it is blamed, and none that was only there."""

from __future__ import annotations

import pytest

from router.workers.suspicion import Breakdown, Suspicion


def broken(*tokens: int) -> Suspicion:
    """Return what is known of a request that was alone at breaks, after so many tokens in each run."""
    made = Suspicion()
    for count in tokens:
        made.placed()
        made.sampled(count)
        made.add_break(Breakdown(), in_turn=False)
    return made


def together(suspects: list[Suspicion], tokens: list[int], in_turn: int = -1) -> Breakdown:
    """Let requests sample tokens and break one worker."""
    breakdown = Breakdown()
    for number, (each, count) in enumerate(zip(suspects, tokens, strict=True)):
        each.placed()
        each.sampled(count)
        each.add_break(breakdown, in_turn=number == in_turn)
    return breakdown


@pytest.mark.parametrize("tokens", [(0, 0), (1, 1), (40, 40), (40, 38), (1, 0)])
def test_who_breaks_twice_at_the_same_place_is_blamed(tokens: tuple[int, int]) -> None:
    assert not broken(tokens[0]).is_blamed
    assert broken(*tokens).is_blamed


@pytest.mark.parametrize("tokens", [(40, 20), (40, 0), (40, 41), (1, 2), (0, 5)])
def test_a_stream_whose_workers_are_killed_twice_is_not(tokens: tuple[int, int]) -> None:
    assert not broken(*tokens).is_blamed


def test_who_gets_further_is_cleared() -> None:
    made = broken(40)
    assert not made.sampled(40)
    assert made.sampled(1)
    assert (made.breaks, made.apart) == (0, False)
    made.placed()
    made.add_break(Breakdown(), in_turn=False)
    assert not made.is_blamed


def test_of_several_that_were_at_two_breaks_none_is_blamed_until_one_breaks_in_its_turn() -> None:
    suspects = [Suspicion() for _ in range(5)]
    together(suspects, [3] * 5)
    together(suspects, [3] * 5)
    assert [each.is_blamed for each in suspects] == [False] * 5
    assert [each.apart for each in suspects] == [True] * 5
    newcomers = [Suspicion() for _ in range(3)]
    together([*suspects[:1], *newcomers], [3] * 4, in_turn=0)
    assert suspects[0].is_blamed
    assert not any(each.is_blamed for each in newcomers)


def test_who_was_at_two_breaks_is_blamed_among_those_that_were_at_one() -> None:
    culprit = Suspicion()
    together([culprit, Suspicion()], [2, 9])
    others = [Suspicion() for _ in range(4)]
    together([culprit, *others], [2, 2, 2, 2, 2])
    assert culprit.is_blamed
    assert not any(each.is_blamed for each in others)


def test_a_first_turn_convicts_nobody_beside_others_that_were_there() -> None:
    """The one without a token may be new; those that run beside it were at both breaks too."""
    new, late = Suspicion(), Suspicion()
    together([new, late], [0, 1])
    together([new, late], [0, 1], in_turn=0)
    assert (new.is_blamed, late.is_blamed) == (False, False)
    together([new], [0], in_turn=0)
    assert new.is_blamed


def test_those_without_a_token_go_first_and_the_others_wait_for_them() -> None:
    first, late = Suspicion(), Suspicion()
    breakdown = together([first, late], [0, 7])
    freed = [0]
    breakdown.when_no_first(lambda: freed.append(1))
    assert (first.apart, first.waits_for) == (True, None)
    assert (late.apart, late.waits_for) == (False, breakdown)
    first.placed()
    assert first.sampled(1)
    assert freed == [0, 1]
    assert late.waits_for is None


def test_who_goes_away_holds_up_nobody() -> None:
    first, late = Suspicion(), Suspicion()
    together([first, late], [0, 7])
    first.leave()
    first.leave()
    assert late.waits_for is None


def test_sequences_that_one_break_ends_count_once() -> None:
    made, breakdown = Suspicion(), Breakdown()
    made.placed()
    for _ in range(3):
        made.add_break(breakdown, in_turn=False)
    assert made.breaks == 1


def severed(suspects: list[Suspicion], tokens: list[int]) -> Breakdown:
    """Break a connection under requests; whether its worker lives is not known yet."""
    breakdown = Breakdown(unsettled=True)
    for each, count in zip(suspects, tokens, strict=True):
        each.placed()
        each.sampled(count)
        each.add_break(breakdown, in_turn=False)
    return breakdown


@pytest.mark.parametrize("excused", [0, 1])
def test_a_break_whose_worker_lives_counts_for_nobody(excused: int) -> None:
    made = Suspicion()
    breakdowns = [severed([made], [0]), severed([made], [0])]
    assert made.is_blamed
    assert made.unsettled == breakdowns
    breakdowns[excused].settle(lives=True)
    assert (made.is_blamed, made.breaks, made.unsettled) == (False, 1, [breakdowns[1 - excused]])
    breakdowns[1 - excused].settle(lives=False)
    assert (made.is_blamed, made.breaks, made.unsettled) == (False, 1, [])
    together([made], [0])
    assert made.is_blamed


def test_a_break_whose_worker_has_ended_counts() -> None:
    made = Suspicion()
    for breakdown in [severed([made], [4]), severed([made], [4])]:
        breakdown.settle(lives=False)
        breakdown.settle(lives=True)  # another process answers later
    assert made.is_blamed


def test_an_excused_request_goes_at_once_and_lets_the_others_go() -> None:
    first, late = Suspicion(), Suspicion()
    breakdown = severed([first, late], [0, 7])
    told = [0]
    breakdown.when_settled(lambda: told.append(1))
    assert (first.apart, late.waits_for) == (True, breakdown)
    breakdown.settle(lives=True)
    assert (first.apart, late.waits_for, told) == (False, None, [0, 1])


def test_of_two_that_were_there_twice_the_other_is_blamed_where_one_is_excused() -> None:
    culprit, innocent = Suspicion(), Suspicion()
    together([culprit], [3])
    earlier = severed([innocent], [3])
    together([culprit, innocent], [3, 3])
    assert not culprit.is_blamed
    earlier.settle(lives=True)
    assert (culprit.is_blamed, innocent.is_blamed) == (True, False)


def test_who_was_cleared_or_gone_since_is_not_excused_of_a_later_break() -> None:
    made = Suspicion()
    earlier = severed([made], [2])
    assert made.sampled(3)
    together([made], [0])
    earlier.settle(lives=True)
    assert made.breaks == 1
