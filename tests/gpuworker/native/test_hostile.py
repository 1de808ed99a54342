"""Whatever the checks of a submit let through: native sampling stays in its memory, and native steps within the cache.

`make sanitize` runs this under AddressSanitizer, where a read beside an array ends the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy
from common.contracts.types import BlockId, SamplingParams, SequenceId
from gpuworker.native.library import best
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gpuworker.runner_harness import SLOTS, queued_on

pytestmark = pytest.mark.skipif(best() is None, reason="the native library was not built")
MOST = 2**31 - 1
GUARD = 7.0e37  # beside the logits, so that a write there shows without a sanitizer too
A = SequenceId(1)

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, width=32, exclude_min=True, allow_infinity=False)
share = st.floats(min_value=0, max_value=1, width=32, exclude_min=True)
logits_values = st.sampled_from([0.0, -1.5, 1.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1e-45])


class Silent:
    """A listener of masks that are never filled."""

    def sampled(self, masks: GrammarBitmask, tokens: Any, at_once: bool) -> Any: ...

    def forced(self, masks: GrammarBitmask, tokens: Any) -> dict[SequenceId, tuple[int, ...]]:
        return {}

    def failed(self, masks: GrammarBitmask) -> None: ...


@st.composite
def params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    ids = st.integers(0, vocab - 1)
    return SamplingParams(
        temperature=draw(st.just(0.0) | positive),
        top_p=draw(share),
        top_k=draw(st.sampled_from([0, 1, 2, vocab - 1, vocab, vocab + 1, MOST])),
        min_p=draw(st.just(0.0) | share),
        max_tokens=64,
        min_tokens=draw(st.integers(0, 64)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=5))),
        repetition_penalty=draw(st.just(1.0) | positive),
        presence_penalty=draw(st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.floats(-2, 2, width=32)),
        logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5)).items()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sampling_stays_within_its_arrays(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 31, 32, 33, 255, 256, 257, 600]))
    rows = [SampledRow(each, 3, (0,)) for each in data.draw(st.lists(params(vocab), min_size=1, max_size=4))]
    count, width = len(rows), 12
    known = data.draw(st.integers(3, width - 1))
    values = data.draw(st.lists(logits_values, min_size=8, max_size=8))
    memory = torch.full((count, vocab + 16), GUARD)
    logits = memory[:, :vocab]
    logits[:] = torch.tensor(values).repeat(vocab // 8 + 1)[:vocab] + torch.linspace(0, 1, vocab)
    table = torch.full((count, width), vocab - 1, dtype=torch.int32)
    positions, places = np.full(count, known, dtype=np.int64), np.arange(count, dtype=np.int32)
    batch = SamplingBatch(rows, vocab, torch.device("cpu"))
    masks = data.draw(st.none() | st.integers(0, 2**32 - 1))
    point = batch.at(positions, places, None if masks is None else opened(count, vocab, masks))
    sampled = batch.sample(logits, point, table)
    assert ((sampled.tokens >= 0) & (sampled.tokens < vocab)).all()
    assert (table[:, known] == sampled.tokens).all()
    assert (table[:, :known] == vocab - 1).all()
    assert (table[:, known + 1 :] == vocab - 1).all()
    assert (memory[:, vocab:] == GUARD).all()


def opened(count: int, vocab: int, word: int) -> GrammarBitmask:
    """Return masks of which every word is `word`, for every row."""
    masks = GrammarBitmask(
        Silent(), [A] * count, np.arange(count, dtype=np.int64), np.zeros(count, dtype=np.int64), count, vocab
    )
    masks.bits[:] = word
    masks.open()
    return masks


def test_an_extreme_penalty_leaves_a_distribution() -> None:
    """A logit over the smallest number is infinite; its share was NaN, which no sorting can place."""
    sampling = SamplingParams(temperature=0.5, repetition_penalty=1e-45, top_k=5, top_p=0.5, logprobs=3)
    batch = SamplingBatch([SampledRow(sampling, 3)], 40, torch.device("cpu"))
    table = torch.tensor([[7, 7, 7, 0]], dtype=torch.int32)
    point = batch.at(np.array([3]), np.zeros(1, dtype=np.int32))
    sampled = batch.sample(torch.linspace(1, 2, 40)[None].clone(), point, table)
    assert sampled.tokens.tolist() == [7]
    assert sampled.logprobs is not None
    assert torch.isfinite(sampled.logprobs.sampled).all()


BLOCKS = SLOTS // 16
HOSTILE_ROWS = {
    "a block behind the cache": ((0, BLOCKS), (), 17),
    "a block far behind it": ((MOST,), (), 9),
    "a copy from behind it": ((0,), (Copy(BlockId(BLOCKS), BlockId(1), 0),), 9),
    "a copy to before it": ((0,), (Copy(BlockId(0), BlockId(-1), 0),), 9),
    "a copy of a block far behind it": ((0,), (Copy(BlockId(MOST), BlockId(1), 0),), 9),
}


@pytest.mark.parametrize("what", HOSTILE_ROWS)
def test_a_block_that_the_cache_does_not_have_fails_the_step_before_it_begins(what: str) -> None:
    blocks, copies, length = HOSTILE_ROWS[what]
    prompt = [3 + n % 200 for n in range(length)]
    runner = queued_on(checkpoint("llama"))
    runner.add_sequence(A, prompt, SamplingParams(temperature=0.0), length)
    row = ScheduledRow(A, 0, length, tuple(map(BlockId, blocks)), True)
    with pytest.raises(EngineFailure, match=r"has a block that the cache does not know|int32"):
        runner.submit_step(StepPlan(1, (row,), copies)).result(timeout=60)
    runner.remove(A)
    runner.add_sequence(A, prompt, SamplingParams(temperature=0.0), length)
    sound = ScheduledRow(A, 0, length, (BlockId(0), BlockId(1)), True)
    (token,) = runner.submit_step(StepPlan(2, (sound,))).result(timeout=60).sampled[A]
    runner.close()
    assert [token] == hf_greedy(checkpoint("llama"), prompt, 1)
