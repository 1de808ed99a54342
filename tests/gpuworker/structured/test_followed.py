"""What may be sampled where a budget ends thoughts by force, with and without a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams, ThoughtBudget
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.thought import ThoughtFollower
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import Followed
from gpuworker.structured.sequence import COMPLETE, Constrained
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, tokenizer

PROMPT = 5
EVERYTHING = set(range(VOCAB_SIZE))
END = tuple(tokenizer().encode("]"))
a, b, c, opener = (tokenizer().encode(letter)[0] for letter in "abc[")
THOUGHT = Constraint(ConstraintKind.REGEX, r"\[[ab]*\]c+")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(checkpoint("llama") / "tokenizer.json", VOCAB_SIZE, (EOS,))


def follow(
    compiler: GrammarCompiler, output: Sequence[int], constraint: Constraint | None = None, min_tokens: int = 0
) -> Followed:
    budget = ThoughtBudget(2, "[", "]", END)
    row = SampledRow(SamplingParams(constraint=constraint, thought=budget, min_tokens=min_tokens), PROMPT, (EOS,))
    constrained = None if constraint is None else Constrained(compiler.compile(constraint), row, ())
    return Followed(row, output, constrained, ThoughtFollower(budget, compiler.spelling()))


def allowed(followed: Followed) -> set[int]:
    bits = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32)
    if followed.matcher is not None:
        followed.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    followed.settle(bits)
    return {token for token in range(VOCAB_SIZE) if int(bits[token // 32]) >> (token % 32) & 1}


def test_without_a_constraint_all_may_be_sampled_but_what_is_forced(compiler: GrammarCompiler) -> None:
    assert allowed(follow(compiler, [opener, a])) == EVERYTHING
    assert allowed(follow(compiler, [opener, a, a])) == {END[0]}
    assert allowed(follow(compiler, [opener, a, a, *END])) == EVERYTHING


def test_end_tokens_wait_for_min_tokens_and_not_for_what_is_forced(compiler: GrammarCompiler) -> None:
    assert allowed(follow(compiler, [opener], min_tokens=4)) == EVERYTHING - {EOS}
    assert allowed(follow(compiler, [opener, a, a], min_tokens=9)) == {END[0]}
    assert allowed(follow(compiler, [c] * 4, min_tokens=4)) == EVERYTHING


def test_a_constraint_goes_on_after_the_end_that_was_forced(compiler: GrammarCompiler) -> None:
    assert allowed(follow(compiler, [], THOUGHT)) == {opener}
    assert {a, b, END[0]} <= allowed(follow(compiler, [opener, a], THOUGHT))
    assert allowed(follow(compiler, [opener, a, a], THOUGHT)) == {END[0]}
    after = follow(compiler, [opener, a, a, *END], THOUGHT)
    assert c in allowed(after)
    assert EOS not in allowed(after)
    after.consume(c)
    after.consume(EOS)
    assert after.ending == COMPLETE


def test_a_constraint_that_lets_no_thought_end_there_blames_the_budget(compiler: GrammarCompiler) -> None:
    followed = follow(compiler, [opener, a, a], Constraint(ConstraintKind.REGEX, r"\[a{9}\]"))
    assert allowed(followed) == {END[0]}
    followed.consume(END[0])
    assert followed.ending is not None
    assert (followed.ending.reason, followed.ending.wrong_field) == (FinishReason.ERROR, "thought_budget")
