"""Drawing under masks equals drawing from logits without what they forbid; the draw waits for masks that are late."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.contracts.types import Constraint, ConstraintKind, SamplingParams, SequenceId
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow, SampledTokens, SamplePoint
from gpuworker.sampling.sampler import SamplingBatch, token_logprobs
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
from tests.support.checkpoints import checkpoint

CPU = torch.device("cpu")
VOCAB = 1100  # 34 words of a mask and a part of one; four blocks of the native sampler, of 256, and a part of one
CONSTRAINT = Constraint(ConstraintKind.REGEX, "of no account here")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.0, seed=6, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, seed=7, top_k=100),
    SamplingParams(temperature=0.9, seed=8, logit_bias=((3, 5.0), (149, 2.0)), repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=9, logprobs=20),
]


def some_allowed(rows: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return [rows, VOCAB]: words and blocks that allow all, nothing, and some; at least one token of a row."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((rows, VOCAB)) < 0.2
    allowed[:, 32:64], allowed[:, 64:96] = False, rng.random((rows, 1)) < 0.5
    for block in (1, 2, 3):
        allowed[:, 256 * block : 256 * (block + 1)] &= rng.random((rows, 1)) < 0.5
    allowed[0] = False
    allowed[:, 149] = True
    return allowed


def masks_of(allowed: npt.NDArray[np.bool_], rows: Sequence[int], of: int) -> GrammarBitmask:
    """Return masks of these rows among so many, not yet open."""
    mask_thread = GrammarMaskThread(GrammarCompiler(checkpoint("llama") / "tokenizer.json", VOCAB, ()))
    mask_thread.close()
    sequences = [SequenceId(row) for row in rows]
    masks = GrammarBitmask(mask_thread, sequences, np.array(rows), np.zeros(len(rows), dtype=np.int64), of, VOCAB)
    padded = np.zeros((len(rows), 32 * masks.bits.shape[1]), dtype=bool)
    padded[:, :VOCAB] = allowed
    masks.bits[:] = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    return masks


def batch(params: Sequence[SamplingParams], masks: GrammarBitmask | None) -> tuple[SamplingBatch, SamplePoint]:
    made = SamplingBatch([SampledRow(each, 2) for each in params], VOCAB, CPU)
    count = len(params)
    return made, made.at(np.full(count, 4), np.arange(count, dtype=np.int32), masks)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], masks: GrammarBitmask | None = None
) -> SampledTokens:
    made, point = batch(params, masks)
    return made.sample(logits.clone(), point, torch.tensor([[3, 9, 9, 11, 0, 0]] * len(params), dtype=torch.int32))


def constrained(params: SamplingParams) -> SamplingParams:
    return replace(params, constraint=CONSTRAINT)


@pytest.mark.parametrize("seed", range(5))
def test_a_mask_leaves_what_minus_infinity_leaves(seed: int) -> None:
    logits = 2 * torch.randn((len(PARAMS), VOCAB), generator=torch.Generator().manual_seed(seed))
    rows = [0, 1, 2, 4, 5]  # and one that is free
    allowed = some_allowed(len(rows), seed)
    masks = masks_of(allowed, rows, len(PARAMS))
    masks.open()
    params = [constrained(each) if row in rows else each for row, each in enumerate(PARAMS)]
    found = sample(logits, params, masks)
    less = logits.clone()
    less[rows] = less[rows].masked_fill(torch.from_numpy(~allowed), -math.inf)
    expected = sample(less, PARAMS)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert all(allowed[n, found.tokens[row]] for n, row in enumerate(rows))


def test_all_greedy_rows_obey_their_masks_too() -> None:
    logits = torch.zeros((2, VOCAB))
    logits[:, 40], logits[:, 7], logits[:, 149] = 3.0, 2.0, 1.0
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, [7, 149]] = True
    masks = masks_of(allowed, [1], 2)
    masks.open()
    assert sample(logits, [PARAMS[0], constrained(PARAMS[0])], masks).tokens.tolist() == [40, 7]


def test_log_probabilities_are_those_of_what_is_allowed_and_disclose_nothing_else() -> None:
    logits = torch.zeros((1, VOCAB))
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, [20, 100, 149]] = True
    masks = masks_of(allowed, [0], 1)
    masks.open()
    asked = constrained(SamplingParams(temperature=0.0, logprobs=5))
    made, point = batch([asked], masks)
    sampled = made.sample(logits, point, torch.zeros((1, 6), dtype=torch.int32))
    (found,) = token_logprobs(sampled, made).values()
    assert found.token_id == 20
    assert found.logprob == pytest.approx(math.log(1 / 3))
    assert [token for token, _ in found.top] == [20, 100, 149]


def test_a_named_token_that_may_not_come_has_minus_infinity() -> None:
    """Whether others in its part of the vocabulary may come, or none."""
    logits = torch.zeros((1, VOCAB))
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, [20, 700]] = True
    masks = masks_of(allowed, [0], 1)
    masks.open()
    asked = constrained(SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(700, 701, 300)))
    made, point = batch([asked], masks)
    sampled = made.sample(logits, point, torch.zeros((1, 6), dtype=torch.int32))
    (found,) = token_logprobs(sampled, made).values()
    assert [token for token, _ in found.top] == [20, 700, 701, 300]
    half = math.log(1 / 2)
    assert [value for _, value in found.top] == pytest.approx([half, half, -math.inf, -math.inf])


def test_end_tokens_before_min_tokens_are_left_to_the_mask() -> None:
    """The mask thread forbids them where it can; here the grammar requires one."""
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, 100] = True
    masks = masks_of(allowed, [0], 1)
    masks.open()
    early = constrained(SamplingParams(temperature=0.0, min_tokens=50, stop_token_ids=(100,)))
    assert sample(torch.zeros((1, VOCAB)), [early], masks).tokens.tolist() == [100]


@pytest.mark.parametrize("natively", [True, False])
def test_a_closing_token_stands_for_the_ends_that_a_mask_forbids(
    natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logit is the largest of those ends; the mask still decides on the token itself, and on ends it allows."""
    if not natively:
        monkeypatch.setattr("gpuworker.sampling.sampler.native_rows", lambda *_: None)
    closing, ends, word = 7, (40, 1099), 149
    logits = torch.zeros((4, VOCAB))
    logits[:, ends[0]], logits[:, ends[1]], logits[:, word], logits[:, closing] = 3.0, 2.0, 1.0, -1.0
    allowed = np.zeros((4, VOCAB), dtype=bool)
    allowed[:, word] = True
    allowed[:3, closing] = True
    allowed[1, ends[0]] = True  # the text may end, by one of its ends
    masks = masks_of(allowed, range(4), 4)
    masks.open()
    asked = constrained(SamplingParams(temperature=0.0, stop_token_ids=(*ends, VOCAB + 5), logprobs=3))
    params = [replace(asked, closing_token_id=closing)] * 2 + [asked, replace(asked, closing_token_id=closing)]
    made, point = batch(params, masks)
    sampled = made.sample(logits, point, torch.zeros((4, 6), dtype=torch.int32))
    assert sampled.tokens.tolist() == [closing, ends[0], word, word]
    scores = [dict(token_logprobs(sampled, made)[row].top) for row in range(4)]
    assert scores[0][closing] - scores[0][word] == pytest.approx(3.0 - 1.0)
    assert scores[1][closing] - scores[1][word] == pytest.approx(2.0 - 1.0)
    assert scores[2][closing] - scores[2][word] == pytest.approx(-1.0 - 1.0)
    assert set(scores[3]) == {word}


def test_the_draw_waits_for_masks_that_are_late() -> None:
    allowed = some_allowed(1, 3)
    masks = masks_of(np.ones_like(allowed), [0], 1)
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(1))
    found: list[int] = []
    drawing = threading.Thread(
        target=lambda: found.extend(sample(logits, [constrained(PARAMS[0])], masks).tokens.tolist())
    )
    drawing.start()
    drawing.join(0.2)
    assert drawing.is_alive()
    masks.bits[:] = masks_of(allowed, [0], 1).bits
    masks.open()
    drawing.join(120.0)
    assert found == [int(logits.masked_fill(torch.from_numpy(~allowed), -math.inf).argmax())]
    assert masks.waited[0] > 0.0


def test_masks_that_are_ready_cost_no_waiting() -> None:
    masks = masks_of(some_allowed(1, 4), [0], 1)
    masks.open()
    sample(torch.zeros((1, VOCAB)), [constrained(PARAMS[0])], masks)
    assert masks.waited[0] == 0.0
