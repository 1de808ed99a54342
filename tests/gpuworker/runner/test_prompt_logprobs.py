"""Log-probabilities of prompts over real (tiny) models, beside sampling rows: against transformers' own logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from common.contracts.types import BlockId, SamplingParams, SequenceId, TokenLogprobs
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.sampling.rows import PromptScores
from gpuworker.sampling.scoring import ScoredSequence, ScoredTokens, best_tokens, score
from gpuworker.scheduling.batch_plan import ScheduledRow, ScoredPart, StepPlan
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy, reference_model
from tests.support.gpuworker.runner_harness import GREEDY, queued_on, runner_on, transformers_model

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
TOLERANCE = 1e-4
needs_native = pytest.mark.skipif(best() is None, reason="the native library was not built")


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB_SIZE) for _ in range(count)]


def reference(kind: str, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities [tokens - 1, vocab] of the token after each but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(checkpoint(kind))(torch.tensor([prompt])).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def assert_scores(found: tuple[TokenLogprobs, ...], prompt: list[int], wanted: torch.Tensor, count: int) -> None:
    assert [entry.token_id for entry in found] == prompt[1:]
    for entry, row in zip(found, wanted, strict=True):
        assert abs(entry.logprob - float(row[entry.token_id])) < TOLERANCE
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == row.topk(count).indices.tolist()
        assert all(abs(value - float(row[token])) < TOLERANCE for token, value in entry.top)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def runner_of(way: str, kind: str) -> ModelRunner:
    directory: Path = checkpoint(kind)
    return queued_on(directory) if way == "queue" else runner_on(transformers_model(directory))


WAYS = [("thread", "llama"), ("thread", "gemma2"), pytest.param("queue", "llama", marks=needs_native)]


@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_prompts_are_scored_in_chunks_beside_decodes_and_other_prompts(way: str, kind: str) -> None:
    runner = runner_of(way, kind)
    scored, plain = tokens(30, 1), tokens(20, 2)
    runner.add_sequence(A, scored, SamplingParams(temperature=0.0, prompt_logprobs=3), len(scored))
    runner.add_sequence(B, plain, GREEDY, len(plain))
    runner.add_sequence(C, scored[:5], SamplingParams(temperature=0.0, prompt_logprobs=0), 5)
    rows = [ScheduledRow(A, 0, 12, blocks(0, 1), False), ScheduledRow(B, 0, 20, blocks(4, 5), True)]
    first = runner.submit_step(StepPlan(1, tuple(rows), (), (ScoredPart(0, 0, 12),)))
    rows = [
        ScheduledRow(B, 20, 1, blocks(4, 5), True),
        ScheduledRow(A, 12, 18, blocks(0, 1), True),
        ScheduledRow(C, 0, 5, blocks(7), True),
    ]
    second = runner.submit_step(StepPlan(2, tuple(rows), (), (ScoredPart(1, 12, 29), ScoredPart(2, 2, 4))))
    results = [first.result(timeout=60), second.result(timeout=60)]
    runner.close()
    of_a = results[0].prompt_logprobs[A] + results[1].prompt_logprobs[A]
    assert_scores(of_a, scored, reference(kind, scored), 3)
    assert_scores(results[1].prompt_logprobs[C], scored[2:5], reference(kind, scored[:5])[2:], 0)
    sampled = [token for result in results for token in result.sampled.get(B, ())]
    assert sampled == hf_greedy(checkpoint(kind), plain, 2)
    assert list(results[1].sampled[A]) == hf_greedy(checkpoint(kind), scored, 1)


@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_a_step_may_score_and_sample_nothing(way: str, kind: str) -> None:
    runner = runner_of(way, kind)
    prompt = tokens(9, 3)
    runner.add_sequence(A, prompt, SamplingParams(max_tokens=0, prompt_logprobs=1), len(prompt))
    plan = StepPlan(1, (ScheduledRow(A, 0, 9, blocks(3), False),), (), (ScoredPart(0, 0, 8),))
    result = runner.submit_step(plan).result(timeout=60)
    runner.close()
    assert_scores(result.prompt_logprobs[A], prompt, reference(kind, prompt), 1)
    assert result.sampled == {}


def test_both_ways_to_score_agree_on_ties_infinities_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 500) * 4
    logits[0, 7] = logits[0, 300] = logits[0].max() + 1  # the best twice
    logits[1, 10:] = float("-inf")
    targets = torch.tensor([300, 3, 0, 499, 7, 12]).numpy()
    asked = ScoredTokens(targets.astype("int32"), targets, (ScoredSequence(A, 6, 20),))
    native = asked.logprobs(score(logits.clone(), asked))[A]
    monkeypatch.setattr("gpuworker.sampling.scoring.best", lambda: None)
    plain = asked.logprobs(score(logits.clone(), asked))[A]
    assert [(each.token_id, each.rank) for each in native] == [(each.token_id, each.rank) for each in plain]
    assert [[token for token, _ in each.top] for each in native] == [[token for token, _ in each.top] for each in plain]
    assert native[0].rank == 1
    assert len(native[1].top) == 10, "impossible tokens are left out"
    for ours, theirs in zip(native, plain, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_each_sequence_gets_as_many_likely_tokens_as_it_asks_for() -> None:
    logits = torch.arange(12.0).reshape(2, 6)
    top, ids = best_tokens(logits, 3)
    scores = PromptScores(logits[:, 0], torch.tensor([6, 6]), ids, top)
    index = torch.tensor([0, 0]).numpy()
    asked = ScoredTokens(index.astype("int32"), index, (ScoredSequence(A, 1, 1), ScoredSequence(B, 1, 3)))
    found = asked.logprobs(scores)
    assert [len(found[each][0].top) for each in (A, B)] == [1, 3]
    assert found[B][0].top == ((5, 11.0), (4, 10.0), (3, 9.0))
