"""When masks open: once what their rows depend on is known, and whatever happens to the steps before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from common.types import Constraint, ConstraintKind, FinishReason, SamplingParams, SequenceId
from gpuworker.sampling.masks import StepMasks
from gpuworker.sampling.sampler import SampledRow
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import MaskKeeper
from gpuworker.structured.sequence import COMPLETE, Constrained
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, tokenizer

A, B = SequenceId(1), SequenceId(2)
PROMPT = 5
PATIENCE = 120.0
AB, ABC = (Constraint(ConstraintKind.REGEX, text) for text in ("ab", "(ab)+c"))
a, b, c = (tokenizer().encode(letter)[0] for letter in "abc")


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(checkpoint("llama") / "tokenizer.json", VOCAB_SIZE, (EOS,))


@pytest.fixture
def keeper(grammars: GrammarCompiler) -> Iterator[MaskKeeper]:
    made = MaskKeeper(grammars)
    yield made
    made.close()


def row(constraint: Constraint) -> SampledRow:
    return SampledRow(SamplingParams(constraint=constraint), PROMPT, (EOS,))


def step(keeper: MaskKeeper, *sequences: SequenceId, drawn: int = 0) -> StepMasks:
    """Begin a step in which all of these sample, having drawn so many tokens each."""
    count = len(sequences)
    return keeper.masks(sequences, np.arange(count), np.full(count, PROMPT + drawn))


def allowed(masks: StepMasks, index: int = 0) -> set[int]:
    """Wait for the masks; return what one of their rows may draw."""
    assert masks._open.wait(PATIENCE)
    assert masks.ready[0] == 1
    bits = masks.bits[index]
    return {token for token in range(VOCAB_SIZE) if int(bits[token // 32]) >> (token % 32) & 1}


EVERYTHING = set(range(VOCAB_SIZE))


def settle(keeper: MaskKeeper) -> None:
    """Wait until the thread has done what was put so far."""
    done = threading.Event()
    keeper._thread.put(done.set)
    assert done.wait(PATIENCE)


def test_a_step_opens_once_the_token_of_the_one_before_is_known(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), ())
    first = step(keeper, A)
    assert allowed(first) == {a}
    second = step(keeper, A, drawn=1)
    settle(keeper)
    assert not second.ready[0]
    first.drew([a])
    assert allowed(second) == {b}


def test_a_step_waits_for_those_of_its_rows_only(keeper: MaskKeeper) -> None:
    """B does not take part in the step that runs, as while its prompt was computed."""
    keeper.add(A, row(AB), ())
    keeper.add(B, row(ABC), ())
    running, other = step(keeper, A), step(keeper, B)
    assert allowed(other) == {a}
    both = step(keeper, A, B)
    settle(keeper)
    assert (running.ready[0], both.ready[0]) == (1, 1)


def test_rows_of_a_step_have_masks_of_their_own(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), [a])
    keeper.add(B, row(ABC), [a, b])
    masks = keeper.masks([SequenceId(9), A, B], np.array([1, 2]), np.array([70, PROMPT + 1, PROMPT + 2]))
    assert (allowed(masks, 0), allowed(masks, 1)) == ({b}, {a, c})
    assert masks.of.tolist() == [-1, 0, 1]
    assert masks.ended == {}


def test_a_complete_output_ends_with_the_step_behind_it_and_may_draw_anything_there(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), [a])
    first, second = step(keeper, A, drawn=1), step(keeper, A, drawn=2)
    first.drew([b])
    assert allowed(second) == EVERYTHING
    assert second.ended == {A: COMPLETE}
    assert first.ended == {}


def test_a_token_that_the_mask_forbade_ends_its_sequence_alone(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), ())
    keeper.add(B, row(AB), ())
    first, second = step(keeper, A, B), step(keeper, A, B, drawn=1)
    first.drew([c, a])
    assert (allowed(second, 0), allowed(second, 1)) == (EVERYTHING, {b})
    assert second.ended[A].reason is FinishReason.ERROR
    assert list(second.ended) == [A]


def test_a_failed_step_opens_the_one_behind_it(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), ())
    first, second = step(keeper, A), step(keeper, A, drawn=1)
    first.failed()
    assert allowed(second) == EVERYTHING
    assert second.ended[A].message == "a step failed"


def test_a_step_that_comes_after_the_failure_opens_too(keeper: MaskKeeper) -> None:
    keeper.add(A, row(AB), ())
    step(keeper, A).failed()
    assert allowed(step(keeper, A, drawn=1)) == EVERYTHING


def test_a_sequence_that_comes_back_is_followed_from_its_output(keeper: MaskKeeper) -> None:
    keeper.add(A, row(ABC), ())
    first = step(keeper, A)
    first.drew([a])
    keeper.remove(A)
    keeper.add(A, row(ABC), [a, b, a])
    assert allowed(step(keeper, A, drawn=3)) == {b}


def test_a_sequence_that_nobody_added_ends_with_an_error(keeper: MaskKeeper) -> None:
    masks = step(keeper, A)
    assert allowed(masks) == EVERYTHING
    assert masks.ended[A].reason is FinishReason.ERROR


def test_a_constraint_that_does_not_compile_ends_its_sequence_with_the_words(keeper: MaskKeeper) -> None:
    keeper.add(A, row(Constraint(ConstraintKind.REGEX, "a(b")), ())
    keeper.add(B, row(AB), ())
    masks = step(keeper, A, B)
    assert (allowed(masks, 0), allowed(masks, 1)) == (EVERYTHING, {a})
    assert "unclosed group" in masks.ended[A].message


class Panic(BaseException):
    """What a library of Rust raises when it breaks: no Exception."""


@pytest.mark.parametrize("where", ["__init__", "consume", "settle"])
def test_whatever_breaks_ends_sequences_and_not_the_thread(
    keeper: MaskKeeper, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise Panic("broken")

    with monkeypatch.context() as patched:
        patched.setattr(Constrained, where, broken)
        keeper.add(A, row(AB), ())
        first, second = step(keeper, A), step(keeper, A, drawn=1)
        first.drew([a])
        assert allowed(second) == EVERYTHING
        assert second.ended[A].message == "the constraint could not be followed: Panic('broken')"
    keeper.remove(A)
    keeper.add(A, row(AB), ())
    assert allowed(step(keeper, A)) == {a}
    assert "a constraint could not be followed" in caplog.text


def test_a_step_that_waited_is_counted_as_late(keeper: MaskKeeper, grammars: GrammarCompiler) -> None:
    keeper.add(A, row(AB), ())
    first = step(keeper, A)
    assert allowed(first) == {a}
    first.wait()
    second = step(keeper, A, drawn=1)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    first.drew([a])
    waiting.join(PATIENCE)
    second.waited[0] = 0.25
    second.drew([b])
    settle(keeper)
    assert keeper.lateness == (2, 1, 0.25)


def test_closing_does_what_was_put_first(grammars: GrammarCompiler) -> None:
    keeper = MaskKeeper(grammars)
    keeper.add(A, row(AB), ())
    masks = step(keeper, A)
    keeper.close()
    assert masks.ready[0] == 1
