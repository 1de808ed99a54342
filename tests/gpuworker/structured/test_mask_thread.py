"""When masks open: once what their rows depend on is known, and whatever happens to the steps before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams, SequenceId
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
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
def mask_thread(grammars: GrammarCompiler) -> Iterator[GrammarMaskThread]:
    made = GrammarMaskThread(grammars)
    yield made
    made.close()


def row(constraint: Constraint) -> SampledRow:
    return SampledRow(SamplingParams(constraint=constraint), PROMPT, (EOS,))


def step(mask_thread: GrammarMaskThread, *sequences: SequenceId, sampled: int = 0) -> GrammarBitmask:
    """Begin a step in which all of these sample, having drawn so many tokens each."""
    count = len(sequences)
    return mask_thread.masks(sequences, np.arange(count), np.full(count, PROMPT + sampled))


def allowed(masks: GrammarBitmask, index: int = 0) -> set[int]:
    """Wait for the masks; return what one of their rows may draw."""
    assert masks._open.wait(PATIENCE)
    assert masks.ready[0] == 1
    bits = masks.bits[index]
    return {token for token in range(VOCAB_SIZE) if int(bits[token // 32]) >> (token % 32) & 1}


EVERYTHING = set(range(VOCAB_SIZE))


def settle(mask_thread: GrammarMaskThread) -> None:
    """Wait until the thread has done what was put so far."""
    done = threading.Event()
    mask_thread._thread.put(done.set)
    assert done.wait(PATIENCE)


def idle(mask_thread: GrammarMaskThread) -> None:
    """Wait until the thread has nothing to do."""
    settle(mask_thread)
    with mask_thread._thread._turn:
        pass


def test_a_step_opens_once_the_token_of_the_one_before_is_known(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), ())
    first = step(mask_thread, A)
    assert allowed(first) == {a}
    second = step(mask_thread, A, sampled=1)
    settle(mask_thread)
    assert not second.ready[0]
    first.sampled([a])
    assert allowed(second) == {b}


def test_a_step_waits_for_those_of_its_rows_only(mask_thread: GrammarMaskThread) -> None:
    """B does not take part in the step that runs, as while its prompt was computed."""
    mask_thread.add(A, row(AB), ())
    mask_thread.add(B, row(ABC), ())
    running, other = step(mask_thread, A), step(mask_thread, B)
    assert allowed(other) == {a}
    both = step(mask_thread, A, B)
    settle(mask_thread)
    assert (running.ready[0], both.ready[0]) == (1, 1)


def test_rows_of_a_step_have_masks_of_their_own(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), [a])
    mask_thread.add(B, row(ABC), [a, b])
    masks = mask_thread.masks([SequenceId(9), A, B], np.array([1, 2]), np.array([70, PROMPT + 1, PROMPT + 2]))
    assert (allowed(masks, 0), allowed(masks, 1)) == ({b}, {a, c})
    assert masks.of.tolist() == [-1, 0, 1]
    assert masks.ended == {}


def test_a_complete_output_ends_with_the_step_behind_it_and_may_draw_anything_there(
    mask_thread: GrammarMaskThread,
) -> None:
    mask_thread.add(A, row(AB), [a])
    first, second = step(mask_thread, A, sampled=1), step(mask_thread, A, sampled=2)
    first.sampled([b])
    assert allowed(second) == EVERYTHING
    assert second.ended == {A: COMPLETE}
    assert first.ended == {}


def test_a_token_that_the_mask_forbade_ends_its_sequence_alone(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), ())
    mask_thread.add(B, row(AB), ())
    first, second = step(mask_thread, A, B), step(mask_thread, A, B, sampled=1)
    first.sampled([c, a])
    assert (allowed(second, 0), allowed(second, 1)) == (EVERYTHING, {b})
    assert second.ended[A].reason is FinishReason.ERROR
    assert list(second.ended) == [A]


def test_a_failed_step_opens_the_one_behind_it(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), ())
    first, second = step(mask_thread, A), step(mask_thread, A, sampled=1)
    first.failed()
    assert allowed(second) == EVERYTHING
    assert second.ended[A].message == "a step failed"


def test_a_step_that_comes_after_the_failure_opens_too(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), ())
    step(mask_thread, A).failed()
    assert allowed(step(mask_thread, A, sampled=1)) == EVERYTHING


def test_a_sequence_that_comes_back_is_followed_from_its_output(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(ABC), ())
    first = step(mask_thread, A)
    first.sampled([a])
    mask_thread.remove(A)
    mask_thread.add(A, row(ABC), [a, b, a])
    assert allowed(step(mask_thread, A, sampled=3)) == {b}


def test_a_sequence_that_nobody_added_ends_with_an_error(mask_thread: GrammarMaskThread) -> None:
    masks = step(mask_thread, A)
    assert allowed(masks) == EVERYTHING
    assert masks.ended[A].reason is FinishReason.ERROR


def test_a_constraint_that_does_not_compile_ends_its_sequence_with_the_words(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, "a(b")), ())
    mask_thread.add(B, row(AB), ())
    masks = step(mask_thread, A, B)
    assert (allowed(masks, 0), allowed(masks, 1)) == (EVERYTHING, {a})
    assert "unclosed group" in masks.ended[A].message


class Panic(BaseException):
    """What a library of Rust raises when it breaks: no Exception."""


@pytest.mark.parametrize("where", ["__init__", "consume", "settle"])
def test_whatever_breaks_ends_sequences_and_not_the_thread(
    mask_thread: GrammarMaskThread, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise Panic("broken")

    with monkeypatch.context() as patched:
        patched.setattr(Constrained, where, broken)
        patched.setattr(Constrained, "plain", False)  # else a mask that needs no settling is not settled
        mask_thread.add(A, row(AB), ())
        first, second = step(mask_thread, A), step(mask_thread, A, sampled=1)
        first.sampled([a])
        assert allowed(second) == EVERYTHING
        assert second.ended[A].message == "the constraint could not be followed: Panic('broken')"
    mask_thread.remove(A)
    mask_thread.add(A, row(AB), ())
    assert allowed(step(mask_thread, A)) == {a}
    assert "a constraint could not be followed" in caplog.text


def test_a_step_that_waited_is_counted_as_late(mask_thread: GrammarMaskThread, grammars: GrammarCompiler) -> None:
    mask_thread.add(A, row(AB), ())
    first = step(mask_thread, A)
    assert allowed(first) == {a}
    first.wait()
    second = step(mask_thread, A, sampled=1)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    first.sampled([a])
    waiting.join(PATIENCE)
    second.waited[0] = 0.25
    second.sampled([b])
    settle(mask_thread)
    assert mask_thread.lateness == (2, 1, 0.25)


def test_masks_that_the_calling_thread_fills_come_once_the_result_is_told(mask_thread: GrammarMaskThread) -> None:
    """The engine plans the next step meanwhile. What it says of the sequence then waits for the tokens."""
    mask_thread.add(A, row(ABC), ())
    first = step(mask_thread, A)
    assert allowed(first) == {a}
    second = step(mask_thread, A, sampled=1)
    idle(mask_thread)
    forced, rest = first.sampled([a], at_once=True)
    assert (forced, second.ready[0]) == ({}, 0)
    mask_thread.remove(A)
    mask_thread.add(A, row(ABC), [a, b])
    rest()
    assert second.ready[0] == 1
    assert allowed(second) == {b}
    assert allowed(step(mask_thread, A, sampled=2)) == {a, c}


def test_tokens_that_come_while_the_thread_is_busy_are_taken_in_there(mask_thread: GrammarMaskThread) -> None:
    mask_thread.add(A, row(AB), ())
    first = step(mask_thread, A)
    assert allowed(first) == {a}
    second = step(mask_thread, A, sampled=1)
    go_on = threading.Event()
    mask_thread._thread.put(lambda: go_on.wait(PATIENCE))  # type: ignore[arg-type]
    _, rest = first.sampled([a], at_once=True)
    rest()
    assert second.ready[0] == 0
    go_on.set()
    assert allowed(second) == {b}


def test_closing_does_what_was_put_first(grammars: GrammarCompiler) -> None:
    mask_thread = GrammarMaskThread(grammars)
    mask_thread.add(A, row(AB), ())
    masks = step(mask_thread, A)
    mask_thread.close()
    assert masks.ready[0] == 1
