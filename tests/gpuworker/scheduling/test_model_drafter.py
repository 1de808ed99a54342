"""How a draft model's guesses are judged, and what of its work stays valid behind a wrong one: exact values."""

from __future__ import annotations

import pytest

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.drafting import MAX_DRAFTS, Speculation
from gpuworker.scheduling.model_drafter import HOPE, DraftState, ModelDrafter, Trust


def drafter(tokens: int = 5, computed: int = 0, trust: Trust | None = None) -> ModelDrafter:
    """Return the drafter of a text without repetitions; the draft model has computed the first tokens of it."""
    made = ModelDrafter(range(tokens), Speculation(), trust or Trust())
    made.state = DraftState(SequenceId(0), (BlockId(0),), computed, tokens)
    return made


def test_a_new_sequence_is_behind_by_its_whole_text() -> None:
    made = ModelDrafter(range(5), Speculation(), Trust())
    assert (made.behind, made.chance) == (5, HOPE)


def test_each_guess_but_the_last_is_computed() -> None:
    made = drafter(5)
    made.guessed([10, 11, 12])
    assert made.state == DraftState(SequenceId(0), (BlockId(0),), computed=7, written=8)
    assert made.propose(2) == (10, 11)


def test_right_guesses_stay_computed() -> None:
    made = drafter(5)
    made.guessed([10, 11, 12])
    made.take([10, 11, 12, 13])
    assert (made.behind, made.state and made.state.written) == (2, 8), "the last guess, and the token behind it"


def test_behind_a_wrong_guess_all_is_computed_again() -> None:
    made = drafter(5)
    made.guessed([10, 11, 12])
    made.take([10, 99])
    assert made.state is not None
    assert (made.state.computed, made.state.written, made.behind) == (6, 6, 1)
    assert made.propose(4) == (), "what was guessed behind it is void"


def test_the_share_of_right_guesses_is_learnt_up_to_the_first_wrong_one() -> None:
    made, share = drafter(5), HOPE
    made.guessed([10, 11, 12])
    made.take([10, 99])
    for right in (True, False):
        share += 0.15 * (right - share)
    assert made.chance == pytest.approx(share)


def test_guesses_that_no_step_verified_are_judged_by_later_tokens() -> None:
    made = drafter(5)
    made.guessed([10, 11, 12])
    made.take([10])
    assert made.propose(4) == (11, 12)
    made.take([11])
    assert made.chance == pytest.approx(1 - (1 - HOPE) * 0.85**2)


def test_what_is_off_recovers_slowly_while_a_guess_costs_little() -> None:
    made = drafter(5)
    for number in range(20):
        made.guessed([10])
        made.take([100 + number])
    low = made.chance
    assert low < 0.1
    made.take([98])
    assert made.chance == pytest.approx(low + 0.01 * (HOPE - low))


def test_what_must_be_caught_up_first_does_not_recover() -> None:
    trust = Trust()
    trust.share = 0.1
    made = drafter(2 * MAX_DRAFTS, computed=0, trust=trust)
    before = made.chance
    made.take([99])
    assert made.chance == before


def test_a_new_sequence_trusts_the_model_as_far_as_others_may() -> None:
    trust = Trust()
    for _ in range(200):
        trust.judge(False)
    first = drafter(trust=trust).chance
    assert first < 0.05
    assert drafter(trust=trust).chance > first, "each new sequence trusts a little more, so that it is tried again"


def test_ngrams_guess_where_they_are_right_more_often() -> None:
    """They cost no step of the draft model."""
    made = ModelDrafter([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], Speculation(), Trust())
    assert made.behind is not None, "a repetition is trusted less than a draft model, at first"
    made.take([4, 5])
    assert made.behind is None
    assert made.propose(2) == (6, 7)


def test_a_prediction_is_followed_before_the_model_is_asked() -> None:
    made = ModelDrafter(range(5), Speculation((20, 21, 22)), Trust())
    assert made.behind is None
    assert made.propose(2) == (20, 21)
    made.take([30, 31])
    assert made.behind == 7


def test_a_text_that_the_model_cannot_read_has_ngrams_alone() -> None:
    made = drafter(5)
    made.give_up()
    assert (made.behind, made.chance, made.propose(4)) == (None, 0.0, ())


def test_no_room_counts_as_a_wrong_guess() -> None:
    made = drafter(5)
    made.wait()
    assert made.chance == pytest.approx(HOPE * 0.85)
