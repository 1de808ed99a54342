"""What is guessed, how many guesses a step verifies, and which samples count: exact values, and all inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import Constraint, ConstraintKind, SamplingParams, ThoughtBudget
from gpuworker.scheduling.drafting import (
    MAX_DRAFTS,
    MAX_INDEXED,
    MAX_STEP_DRAFTS,
    NO_PRICES,
    DraftPrices,
    NgramDrafter,
    Outlook,
    Speculation,
    drafts_worth_it,
    outlooks_worth_it,
    speculation_of,
    verified,
)

TOKENS = st.lists(st.integers(0, 3), max_size=60)


@pytest.mark.parametrize(
    ("drafts", "samples", "counting"),
    [
        ((), (7,), 1),
        ((7,), (7, 8), 2),
        ((7,), (6, 8), 1),
        ((7, 8, 9), (7, 8, 1, 2), 3),
        ((7, 8, 9), (1, 8, 9, 2), 1),
        ((7, 8, 9), (7, 8, 9, 2), 4),
    ],
)
def test_samples_count_up_to_the_first_that_differs_from_its_draft(
    drafts: tuple[int, ...], samples: tuple[int, ...], counting: int
) -> None:
    assert verified(drafts, samples) == counting


@given(st.lists(st.integers(0, 2), max_size=8), st.data())
def test_every_counting_sample_follows_drafts_that_were_sampled(drafts: list[int], data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    counting = verified(drafts, samples)
    assert samples[: counting - 1] == drafts[: counting - 1]
    assert counting == len(samples) or samples[counting - 1] != drafts[counting - 1]


# ---------------------------------------------------------------- n-grams


def of(text: list[int], prediction: list[int] | None = None, output: int = 0) -> NgramDrafter:
    return NgramDrafter(text, Speculation(tuple(prediction or ()), output))


def test_a_text_goes_on_as_it_did_after_the_same_three_tokens() -> None:
    drafter = of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert drafter.propose(4) == (4, 5, 6, 9)
    assert drafter.propose(2) == (4, 5)


def test_two_equal_tokens_are_a_place_where_three_are_none() -> None:
    assert of([1, 2, 4, 9, 1, 2]).propose(2) == (4, 9)
    assert of([7, 1, 2, 3, 1, 2, 4, 7, 1, 2]).propose(1) == (3,), "7, 1, 2 stood before 3"


def test_one_equal_token_is_no_place() -> None:
    assert of([1, 2, 4, 9, 2]).propose(4) == ()


def test_the_last_of_several_places_counts() -> None:
    assert of([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]).propose(1) == (5,)


def test_a_repetition_goes_on() -> None:
    assert of([7, 1, 2, 1, 2, 1]).propose(5) == (2, 1, 2, 1, 2)


def test_a_guess_is_trusted_from_the_first_one_on() -> None:
    """A copy is short: what is spent on learning that it is one is a part of its time."""
    drafter = of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    chances = [drafter.chance]
    for token in (4, 5, 6):
        drafter.take([token])
        chances.append(drafter.chance)
    assert chances == pytest.approx([0.5, 0.625, 0.71875, 0.7890625])


def test_wrong_guesses_soon_end_the_trust() -> None:
    drafter = of([*range(1, 40), 0, 1, 2])
    for token in range(50, 56):
        drafter.take([token, token + 50, 3 * (token - 50) + 1, 3 * (token - 50) + 2])
    assert 0 < drafter.chance < 0.2


def test_a_wrong_guess_costs_trust_and_ends_the_guessing() -> None:
    drafter = of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    drafter.take([4, 5, 9])
    assert drafter.chance == 0
    assert drafter.propose(3) == ()


def test_a_text_is_followed_again_behind_an_edit() -> None:
    drafter = of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    drafter.take([4, 99, 6, 7, 8])
    assert drafter.propose(2) == (1, 2)
    assert drafter.chance == pytest.approx(0.625 * 0.75 * 0.75 + 0.25)


def test_a_place_near_the_last_guess_is_better_than_a_later_one() -> None:
    prediction = [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3, 60]
    drafter = of([9], prediction)
    drafter.take([9, 1, 2, 3])
    assert drafter.propose(1) == (40,), "the first line is followed, not the last that looks like it"


def test_a_prediction_is_trusted_from_its_first_token() -> None:
    drafter = of([9, 9], [5, 6, 7])
    assert drafter.chance == 0.75
    assert drafter.propose(8) == (5, 6, 7)
    drafter.take([5, 6, 7])
    assert (drafter.chance, drafter.propose(8)) == (0, ())


def test_an_earlier_run_has_followed_its_part_of_the_prediction() -> None:
    moved = of([9, 9, 5, 6], [5, 6, 7, 8], output=2)
    assert moved.propose(8) == (7, 8)
    assert moved.chance == pytest.approx(1 - 0.25 * 0.75**2)


def test_old_tokens_of_a_long_prompt_are_not_indexed() -> None:
    filler = list(range(100, 100 + MAX_INDEXED))
    assert of([1, 2, 3, 4, *filler, 1, 2, 3]).propose(1) == ()
    assert of([*filler, 1, 2, 3, 4, 5, 1, 2, 3]).propose(1) == (4,)


@given(TOKENS, TOKENS, TOKENS, st.integers(0, 12))
def test_guesses_are_known_tokens_and_depend_on_the_text_alone(
    prompt: list[int], prediction: list[int], output: list[int], most: int
) -> None:
    at_once, one_by_one = of(prompt, prediction), of(prompt, prediction)
    at_once.take(output)
    for token in output:
        one_by_one.take([token])
    later = of([*prompt, *output], prediction, len(output))
    found = at_once.propose(most)
    assert found == one_by_one.propose(most) == later.propose(most)
    assert at_once.chance == one_by_one.chance == later.chance
    assert len(found) <= most
    assert set(found) <= {*prompt, *prediction, *output}
    assert 0 <= at_once.chance <= 1
    assert bool(found) or not at_once.chance or not most


@given(st.lists(st.integers(0, 50), min_size=8, max_size=40, unique=True))
def test_a_copy_of_the_prompt_is_guessed_after_three_tokens(passage: list[int]) -> None:
    drafter = of([*passage, 99, *passage[:3]])
    for place in range(3, len(passage)):
        assert drafter.propose(1) == (passage[place],)
        drafter.take([passage[place]])


# ---------------------------------------------------------------- how many


def test_without_prices_a_sequence_drafts_as_long_as_its_guesses_are_likely() -> None:
    assert drafts_worth_it([0.0], 1, NO_PRICES) == [0]
    assert drafts_worth_it([0.2], 1, NO_PRICES) == [0]
    assert drafts_worth_it([0.25, 0.58, 0.75, 1.0], 4, NO_PRICES) == [1, 2, 5, MAX_DRAFTS]


def test_a_larger_batch_drafts_less_and_at_last_nothing() -> None:
    prices = DraftPrices(step=0.010, draft=0.0005)
    counts = [drafts_worth_it([0.9] * rows, rows, prices) for rows in (1, 8, 16, 20)]
    assert [each[0] for each in counts] == [13, 4, 1, 0]
    assert counts[-1] == [0] * 20


def test_the_gap_before_a_step_must_be_earned() -> None:
    prices = DraftPrices(step=0.001, draft=0.0, gap=0.002)
    assert drafts_worth_it([0.6], 1, prices) == [0], "a gap of two steps for 1.5 tokens"
    assert drafts_worth_it([0.95], 1, prices) == [MAX_DRAFTS]


def test_the_likeliest_drafts_come_first() -> None:
    assert drafts_worth_it([0.5, 1.0, 0.9], 3, NO_PRICES, room=20) == [0, MAX_DRAFTS, 4]


def test_drafts_end_where_a_further_one_would_lower_the_rate() -> None:
    """Beyond, each brings tokens in more time than the tokens so far."""
    prices = DraftPrices(step=0.010, draft=0.002, gap=0.001)
    (best,) = drafts_worth_it([0.9], 1, prices)

    def rate(count: int) -> float:
        return sum(0.9**n for n in range(count + 1)) / (0.011 + count * 0.002)

    assert best == max(range(MAX_DRAFTS + 1), key=rate)


def test_one_sequence_may_not_hold_up_many() -> None:
    prices = DraftPrices(step=0.010, draft=0.0001, gap=0.001)
    assert drafts_worth_it([0.9, *[0.0] * 63], 64, prices) == [0] * 64
    assert drafts_worth_it([0.9, *[0.0] * 15], 16, prices)[0] > 0


@given(
    st.lists(st.floats(0, 1), max_size=70),
    st.integers(1, 300),
    st.builds(DraftPrices, st.floats(1e-5, 1), st.floats(0, 1), st.floats(0, 1)),
    st.integers(0, MAX_STEP_DRAFTS),
)
def test_drafts_stay_within_bounds_and_never_cost_more_than_they_bring(
    chances: list[float], rows: int, prices: DraftPrices, room: int
) -> None:
    counts = drafts_worth_it(chances, rows, prices, room)
    assert len(counts) == len(chances)
    assert sum(counts) <= room
    assert all(0 <= count <= MAX_DRAFTS for count in counts)
    gain = sum(chance**n for chance, count in zip(chances, counts, strict=True) for n in range(1, count + 1))
    cost = prices.gap + sum(counts) * prices.draft
    assert not any(counts) or gain * prices.step >= rows * cost * (1 - 1e-9)


def test_a_sequence_drafts_no_more_than_it_has_guesses() -> None:
    outlooks = [Outlook(1.0, 2), Outlook(0.75), Outlook(0.9, 1), Outlook(1.0, 0)]
    assert outlooks_worth_it(outlooks, 4, NO_PRICES) == [2, 5, 1, 0]
    assert outlooks_worth_it([Outlook(1.0, 2)], 1, DraftPrices(step=0.001, draft=0.0, gap=0.0025)) == [0]
    assert outlooks_worth_it([Outlook(1.0, 3)], 1, DraftPrices(step=0.001, draft=0.0, gap=0.0025)) == [3]


# ---------------------------------------------------------------- what a draft model costs


def guessed(chance: float, behind: int = 1, left: int = 100) -> Outlook:
    return Outlook(chance, behind=behind, left=left)


def test_a_draft_model_guesses_as_deep_as_its_steps_pay() -> None:
    """The rate of n drafts is sum(p ** k) / (step + gap + n x (draft + guess)); n-grams cost no guess."""
    prices = DraftPrices(step=0.010, draft=0.001, gap=0.001, guess=0.001)
    (best,) = outlooks_worth_it([guessed(0.8)], 1, prices)

    def rate(count: int) -> float:
        return sum(0.8**n for n in range(count + 1)) / (0.011 + count * 0.002)

    assert best == max(range(1, MAX_DRAFTS + 1), key=rate) == 4
    assert outlooks_worth_it([guessed(0.8)], 1, DraftPrices(0.010, 0.001, 0.001, guess=0.007)) == [0]
    assert outlooks_worth_it([Outlook(0.8)], 1, DraftPrices(0.010, 0.001, 0.001, guess=0.007)) == [6], (
        "n-grams are free"
    )


def test_the_steps_of_a_draft_model_are_shared() -> None:
    prices = DraftPrices(step=0.010, draft=0.0002, guess=0.004)
    assert outlooks_worth_it([guessed(0.8)] * 8, 8, prices) == [1] * 8
    assert outlooks_worth_it([guessed(0.8)], 8, prices) == [0], "seven others wait for the guesses of one"


def test_known_guesses_do_not_wait_for_those_of_the_model() -> None:
    """A forced run and n-grams draft alone where the model's step does not pay."""
    prices = DraftPrices(step=0.010, draft=0.001, guess=0.020)
    assert outlooks_worth_it([Outlook(1.0, 3), guessed(0.9)], 2, prices) == [3, 0]


def test_known_guesses_may_be_more_than_the_model_is_deep() -> None:
    prices = DraftPrices(step=0.010, draft=0.0005, guess=0.0005)
    forced, of_model = outlooks_worth_it([Outlook(1.0, 8), guessed(0.9)], 2, prices)
    assert (forced, of_model) == (8, 2)


@pytest.mark.parametrize(("behind", "counts"), [(17, [16]), (400, [16]), (4000, [0])])
def test_a_text_is_caught_up_where_the_rest_of_the_output_may_save_the_time(behind: int, counts: list[int]) -> None:
    """Half of the guesses right save a third of 100 steps of 10 ms: 330 ms; a token costs 0.5 ms."""
    prices = DraftPrices(step=0.010, catch_up=0.0005)
    assert outlooks_worth_it([guessed(0.999, behind)], 1, prices) == counts


def test_others_share_the_steps_that_catching_up_may_save() -> None:
    prices = DraftPrices(step=0.010, catch_up=0.0005)
    assert outlooks_worth_it([guessed(0.999, 400)], 1, prices) == [MAX_DRAFTS]
    assert outlooks_worth_it([guessed(0.999, 400), *[Outlook(0.0)] * 7], 8, prices) == [0] * 8


@given(
    st.lists(st.builds(Outlook, st.floats(0, 1), st.integers(0, 20), st.none() | st.integers(1, 500), st.just(50))),
    st.builds(DraftPrices, *[st.floats(1e-5, 1), *[st.floats(0, 1)] * 4]),
)
def test_drafts_of_a_model_never_cost_more_than_they_bring(outlooks: list[Outlook], prices: DraftPrices) -> None:
    rows = max(1, len(outlooks))
    counts = outlooks_worth_it(outlooks, rows, prices)
    pairs = list(zip(outlooks, counts, strict=True))
    assert sum(counts) <= MAX_STEP_DRAFTS
    assert all(count <= min(each.most, MAX_DRAFTS) for each, count in pairs)
    depth = max((count for each, count in pairs if each.behind is not None), default=0)
    gain = sum(each.chance**n for each, count in pairs for n in range(1, count + 1))
    cost = prices.gap + sum(counts) * prices.draft + depth * prices.guess
    assert not any(counts) or gain * prices.step >= rows * cost * (1 - 1e-9)


# ---------------------------------------------------------------- who


def test_a_sequence_with_a_budget_of_thoughts_does_not_draft() -> None:
    assert speculation_of(SamplingParams(thought=ThoughtBudget(4, "<", ">", (5,))), (1, 2), 0) is None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.2, min_tokens=4, logprobs=2, bad_words=((1, 2),)),
        SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a*")),
    ],
    ids=["adjusted", "constraint"],
)
def test_any_other_sampling_drafts(sampling: SamplingParams) -> None:
    assert speculation_of(sampling, (1, 2), 3) == Speculation((1, 2), 3)
