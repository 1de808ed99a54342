"""Drawing tokens: each parameter against a naive float64 reference, the distribution, independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.contracts.types import SamplingParams
from gpuworker.sampling import sampler
from gpuworker.sampling.rows import SampledRow, SampledTokens, uniforms
from gpuworker.sampling.sampler import SamplingBatch, token_logprobs
from gpuworker.sampling.truncation import Truncation, sample_truncated

CPU = torch.device("cpu")
VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
PROMPT, OUTPUT = [3, 3, 7, 9], [9, 11, 11, 12]
Float64Array = npt.NDArray[np.float64]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def batch_of(params: Sequence[SamplingParams], vocab: int = VOCAB, eos: tuple[int, ...] = ()) -> SamplingBatch:
    return SamplingBatch([SampledRow(each, len(PROMPT), eos) for each in params], vocab, CPU)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], eos: tuple[int, ...] = (), positions: Sequence[int] = ()
) -> SampledTokens:
    """Draw after PROMPT and OUTPUT for every row; its batch index is its row."""
    num_tokens = PROMPT + OUTPUT
    table = torch.tensor([[*num_tokens, 0, 0]] * len(params), dtype=torch.int32)
    at = np.array(positions or [len(num_tokens)] * len(params), dtype=np.int64)
    batch = batch_of(params, logits.shape[1], eos)
    return batch.sample(logits.clone(), batch.at(at, np.arange(len(params), dtype=np.int32)), table)


# ---------------------------------------------------------------- the naive reference


def adjusted(logits: Float64Array, params: SamplingParams) -> Float64Array:
    """Penalties and bias, token by token, as the docstring of the sampler and the .proto say."""
    out = logits.copy()
    for token in set(PROMPT + OUTPUT):
        value = out[token]
        out[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(OUTPUT):
        out[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    for token, bias in params.logit_bias:
        out[token] += bias
    return out


def probabilities(logits: Float64Array, params: SamplingParams) -> Float64Array:
    """The distribution that is drawn from."""
    return plain_probabilities(adjusted(logits, params) / params.temperature, params)


def plain_probabilities(scaled: Float64Array, params: SamplingParams) -> Float64Array:
    """The distribution after top_k, top_p and min_p."""
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = 0.0
    for token in order:
        share, before = p[token], before + p[token]
        if before - share >= params.top_p and params.top_p < 1.0:
            p[token] = 0.0
    p[p < params.min_p * p.max()] = 0.0
    result: Float64Array = p / p.sum()
    return result


def expected_token(logits: Float64Array, params: SamplingParams, position: int) -> int:
    uniform = uniforms(np.array([params.seed], dtype=np.uint64), np.array([position], dtype=np.int64))[0]
    return int(np.searchsorted(np.cumsum(probabilities(logits, params)), uniform, side="right"))


CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.2),
    "all cuts": SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.1),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.1),
    "bias": SamplingParams(logit_bias=((4, 6.0), (5, -100.0))),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=-0.5,
        frequency_penalty=0.4,
        logit_bias=((11, 2.0),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_equal_the_naive_reference(name: str) -> None:
    params = [replace(CASES[name], seed=seed) for seed in range(200)]
    logits = random_logits(1)
    sampled = sample(logits.expand(200, -1), params).tokens.tolist()
    exact = logits[0].double().numpy()
    assert sampled == [expected_token(exact, each, len(PROMPT + OUTPUT)) for each in params]


def test_a_mixed_batch_draws_what_each_row_draws_alone() -> None:
    params = [replace(each, seed=n) for n, each in enumerate(CASES.values())] + [GREEDY]
    logits = random_logits(len(params))
    together = sample(logits, params).tokens.tolist()
    alone = [sample(logits[n : n + 1], [each]).tokens.item() for n, each in enumerate(params)]
    assert together == alone


def test_the_draws_have_the_distribution() -> None:
    """Chi-square over 20,000 seeds, eight cells: the 99.9 % quantile for seven degrees of freedom is 24.3."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]])
    count = 20_000
    sampled = sample(logits.expand(count, -1), [SamplingParams(seed=seed) for seed in range(count)]).tokens
    expected = logits[0].double().softmax(dim=0) * count
    observed = torch.bincount(sampled, minlength=8)
    assert float(((observed - expected) ** 2 / expected).sum()) < 24.3


def test_the_draws_of_one_seed_have_the_distribution_over_positions() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]])
    count = 20_000
    uniform = uniforms(np.full(count, 7, dtype=np.uint64), np.arange(count))
    expected = logits[0].double().softmax(dim=0)
    observed = np.bincount(np.searchsorted(expected.cumsum(0).numpy(), uniform, side="right"), minlength=8)
    assert float(((observed - expected.numpy() * count) ** 2 / (expected.numpy() * count)).sum()) < 24.3


def splitmix64(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 5), (2**64 - 1, 4096)])
def test_the_number_behind_a_draw_is_that_of_whole_number_arithmetic(seed: int, position: int) -> None:
    golden, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    keyed = splitmix64((seed + golden) % 2**64) ^ splitmix64((position * golden + second) % 2**64)
    found = uniforms(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.int64))
    assert found[0] == (splitmix64(keyed) >> 11) / 2**53


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = (grid.ravel() for grid in np.meshgrid(np.arange(300), np.arange(300)))
    numbers = uniforms(seeds.astype(np.uint64), positions).reshape(300, 300)
    assert len(np.unique(numbers)) == numbers.size
    for shifted in (numbers[1:, :] * numbers[:-1, :], numbers[:, 1:] * numbers[:, :-1], numbers * numbers.T):
        assert abs(float(shifted.mean()) - 0.25) < 0.005


# ---------------------------------------------------------------- truncation


def reachable(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return the tokens that some of 4,096 evenly spread numbers draw."""
    count = 4096
    uniform = torch.arange(count, dtype=torch.float64) / count
    return set(sample_truncated(logits.expand(count, -1), Truncation.of([params] * count, CPU), uniform).tolist())


def test_exactly_top_k_tokens_are_kept_when_logits_tie() -> None:
    assert reachable(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), SamplingParams(top_k=2)) == {1, 2}


def test_ties_that_go_on_beyond_what_is_sorted_first_are_kept_by_id() -> None:
    assert reachable(torch.zeros((1, 700)), SamplingParams(top_k=2)) == {0, 1}


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    assert reachable(torch.tensor([[0.5, 0.3, 0.2]]).log(), SamplingParams(top_p=0.6)) == {0, 1}


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(min_p=0.5), SamplingParams(top_k=700)])
def test_more_tokens_than_are_sorted_first_may_be_kept(params: SamplingParams) -> None:
    """Beside a row that keeps three; drawn at 500 numbers each."""
    scaled = (0.01 * random_logits(2, 1000)).repeat(500, 1)
    uniform = (torch.arange(500, dtype=torch.float64) / 500).repeat_interleave(2)
    narrow = SamplingParams(top_k=3)
    sampled = sample_truncated(scaled, Truncation.of([params, narrow] * 500, CPU), uniform).view(500, 2)
    for row, each in enumerate((params, narrow)):
        cumulative = np.cumsum(plain_probabilities(scaled[row].double().numpy(), each))
        expected = np.searchsorted(cumulative, np.arange(500) / 500, side="right")
        # A number that falls on the border of two tokens may go either way.
        assert (sampled[:, row].numpy() == expected).mean() > 0.99


# ---------------------------------------------------------------- both ways, and the rest of the batch

LARGE = 5000
MANY_CASES = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k of equal logits": SamplingParams(top_k=7),
    "top_k": SamplingParams(top_k=300, top_p=0.7),
    "top_p": SamplingParams(top_p=0.95),
    "flat top_p": SamplingParams(temperature=5.0, top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.4, top_k=900, top_p=0.9, min_p=0.001, repetition_penalty=1.2, logprobs=4),
}


def rounded_logits(rows: int) -> torch.Tensor:
    """Return logits of which many are equal, as those of a bfloat16 model are."""
    return random_logits(rows, LARGE).bfloat16().float()


@pytest.mark.parametrize("name", MANY_CASES)
def test_both_ways_draw_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [replace(MANY_CASES[name], seed=seed) for seed in range(200)]
    logits = rounded_logits(200)
    native = sample(logits, params)
    monkeypatch.setattr(sampler, "native_rows", lambda *_: None)
    by_torch = sample(logits, params)
    # A number that falls on the border of two tokens may go either way.
    assert (native.tokens == by_torch.tokens).float().mean() >= 0.99
    if native.logprobs is not None:
        assert by_torch.logprobs is not None
        assert torch.equal(native.logprobs.top_ids.long(), by_torch.logprobs.top_ids.long())
        torch.testing.assert_close(native.logprobs.top, by_torch.logprobs.top, atol=1e-5, rtol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_gets_the_same_bits_wherever_it_stands_in_whichever_batch(threads: int) -> None:
    """Including rows that sort wider and ask for more log-probabilities than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        asked = [replace(each, seed=n, logprobs=3) for n, each in enumerate([*MANY_CASES.values(), GREEDY])]
        others = [replace(SamplingParams(top_k=LARGE, logprobs=20), seed=n) for n in range(60)]  # enough for a team
        logits = rounded_logits(len(asked) + len(others))
        params = [*asked, *others]
        together = token_logprobs(sample(logits, params), batch_of(params))
        backwards = token_logprobs(sample(logits.flip(0), params[::-1]), batch_of(params[::-1]))
        for n, each in enumerate(asked):
            alone = token_logprobs(sample(logits[n : n + 1], [each]), batch_of([each]))[0]
            assert alone == together[n] == backwards[len(params) - 1 - n]
    finally:
        torch.set_num_threads(before)


def test_of_equal_log_probabilities_the_lowest_ids_come_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    params = replace(GREEDY, logprobs=4)
    (found,) = token_logprobs(sample(logits, [params]), batch_of([params])).values()
    assert [token for token, _ in found.top] == [1, 3, 2, 4]


# ---------------------------------------------------------------- greedy, ends, log-probabilities


def test_greedy_takes_the_first_of_the_best() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 0.0]]), [GREEDY, GREEDY]).tokens.tolist() == [1, 0]


def test_a_batch_of_greedy_rows_is_plain() -> None:
    assert batch_of([GREEDY, GREEDY]).plain
    assert not batch_of([GREEDY, SamplingParams()]).plain


def test_ends_are_forbidden_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=len(OUTPUT) + 1, stop_token_ids=(2,))
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0]])
    now, later = len(PROMPT + OUTPUT), len(PROMPT + OUTPUT) + 1
    assert sample(logits, [params], eos=(1,), positions=[now]).tokens.tolist() == [3]
    assert sample(logits, [params], eos=(1,), positions=[later]).tokens.tolist() == [1]


def test_an_end_of_sequence_that_is_ignored_may_come_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=99, ignore_eos=True)
    assert sample(torch.tensor([[0.0, 9.0]]), [params], eos=(1,)).tokens.tolist() == [1]


def test_logprobs_are_taken_after_penalties_and_before_temperature() -> None:
    params = SamplingParams(temperature=0.4, top_k=2, repetition_penalty=1.5, logit_bias=((8, 1.0),), logprobs=3)
    logits = random_logits(2)
    sampled = sample(logits, [GREEDY, params])
    found = token_logprobs(sampled, batch_of([GREEDY, params]))
    values = adjusted(logits[1].double().numpy(), params)
    values -= math.log(np.exp(values).sum())
    best = np.argsort(-values)[:3]
    assert list(found) == [1]
    assert found[1].token_id == sampled.tokens[1]
    assert found[1].logprob == pytest.approx(values[found[1].token_id], abs=1e-5)
    assert [token for token, _ in found[1].top] == best.tolist()
    assert [value for _, value in found[1].top] == pytest.approx(values[best].tolist(), abs=1e-5)


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    params = [replace(GREEDY, logprobs=0), replace(GREEDY, logprobs=4)]
    found = token_logprobs(sample(random_logits(2), params), batch_of(params))
    assert [len(found[row].top) for row in (0, 1)] == [0, 4]


def test_a_row_may_name_the_tokens_of_its_log_probabilities() -> None:
    """They stand behind the sampled token, in the order of the request; other rows keep their best."""
    listed = replace(GREEDY, logprobs=4, logprob_token_ids=(40, 7, 3, 49, 12, 11))
    params = [replace(GREEDY, logprobs=2), listed, replace(listed, temperature=1.3, repetition_penalty=1.7, seed=4)]
    logits = random_logits(3)
    logits[1, 7] = 20.0
    sampled = sample(logits, params)
    found = token_logprobs(sampled, batch_of(params))
    assert len(found[0].top) == 2
    for row in (1, 2):
        values = adjusted(logits[row].double().numpy(), params[row])
        values -= math.log(np.exp(values).sum())
        token = int(sampled.tokens[row])
        expected = [token, *(each for each in listed.logprob_token_ids if each != token)]
        assert [each for each, _ in found[row].top] == expected
        assert [value for _, value in found[row].top] == pytest.approx(values[expected].tolist(), abs=1e-5)
    assert sampled.tokens[1] == 7


def test_as_many_tokens_may_be_named_as_the_vocabulary_has() -> None:
    params = replace(GREEDY, logprobs=0, logprob_token_ids=tuple(range(VOCAB)))
    (found,) = token_logprobs(sample(random_logits(1), [params]), batch_of([params])).values()
    assert sorted(token for token, _ in found.top) == list(range(VOCAB))
    assert sum(math.exp(value) for _, value in found.top) == pytest.approx(1.0)


def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((2, VOCAB), float("nan"))
    assert all(0 <= token < VOCAB for token in sample(logits, [SamplingParams(), GREEDY]).tokens.tolist())


def test_ids_beyond_the_vocabulary_have_no_effect() -> None:
    params = replace(GREEDY, logit_bias=((VOCAB + 5, 9.0),), stop_token_ids=(VOCAB,), min_tokens=99)
    assert sample(random_logits(1), [params]).tokens.tolist() == [int(random_logits(1).argmax())]


def test_a_step_has_numbers_for_the_rows_that_sample_at_random_alone_and_only_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The native sampler makes its own; nothing would read those of the engine's thread."""
    rows = [SampledRow(SamplingParams(seed=3), 0), SampledRow(SamplingParams(temperature=0.0), 0)]
    rows.append(SampledRow(SamplingParams(seed=5), 0))
    asked: list[int] = []

    def counted(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        asked.append(len(seeds))
        return uniforms(seeds, positions)

    monkeypatch.setattr("gpuworker.sampling.rows.uniforms", counted)
    batch = SamplingBatch(rows, 8, torch.device("cpu"))
    point = batch.at(np.array([10, 11, 12]), np.arange(3, dtype=np.int32))
    assert asked == []
    expected = uniforms(np.array([3, 5], dtype=np.uint64), np.array([10, 12]))
    assert point.uniform.tolist() == expected.tolist()
    assert asked == [2]
