"""Samples the next token of each row from its logits.

First come the penalties, for repetition (prompt and output), then for frequency and presence (output), and the bias.
A closing token takes the logit of an end that the constraint forbids, if that is larger.
Then the tokens that a constraint forbids, those that complete a bad word, and forbidden end tokens are excluded, and
log-probabilities are taken.
Temperature, top_k, top_p, min_p and the sample follow. So log-probabilities cover exactly the tokens that may be
sampled. A sample inverts the cumulative distribution, in order of token id and in float64. It does so at one number in
[0, 1) that is a hash of (seed, position). The same logits therefore give the same token, whatever else is in the batch
and whichever worker runs the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.types import TokenLogprobs
from gpuworker.memory.devices import sent
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.native_sampler import NativeRows, NativeSample, RowFollower, native_rows
from gpuworker.sampling.rows import (
    Float64Array,
    Int32Array,
    Int64Array,
    RowLogprobs,
    SampledRow,
    SampledTokens,
    SamplePoint,
)
from gpuworker.sampling.scoring import best_tokens
from gpuworker.sampling.truncation import Truncation, invert, sample_truncated

_ANY = -1  # fills short words from the left


# Forbids tokens that would complete a bad word, on any device and without waiting for it.
class BadWords:
    """W bad words of a batch of rows. A word forbids its last token after output that ends with its other tokens."""

    def __init__(self, words: Sequence[tuple[int, tuple[int, ...]]], prompt_tokens: Sequence[int]) -> None:
        """`words` are pairs of a row and its word; `prompt_tokens` are those of each row."""
        rest = max(len(word) for _, word in words) - 1
        before = np.full((len(words), rest), _ANY, dtype=np.int64)
        for place, (_, word) in enumerate(words):
            before[place, rest + 1 - len(word) :] = word[:-1]
        rows = np.array([row for row, _ in words], dtype=np.int64)
        last = np.array([word[-1] for _, word in words], dtype=np.int64)
        first = np.array([prompt_tokens[row] for row, _ in words], dtype=np.int64)  # where the output begins
        self._arrays: list[torch.Tensor] = list(map(torch.from_numpy, (before, rows, last, first)))

    def move(self, device: torch.device) -> None:
        self._arrays = [sent(each, device) for each in self._arrays]

    def forbid(
        self, logits: torch.Tensor, table: torch.Tensor, batch_index: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Forbid tokens in place. logits [S, vocab]; the tokens so far are table[batch_index[s], : positions[s]]."""
        before, rows, last, first = self._arrays
        count = torch.arange(-before.shape[1], 0, device=logits.device)
        places = positions.long()[rows][:, None] + count  # [W, rest]
        tokens = table[batch_index.long()[rows][:, None], places.clamp_min(0)]
        same = (tokens == before) & (places >= first[:, None])
        completes = (same | (before == _ANY)).all(dim=1)
        change = torch.where(completes, float("-inf"), 0.0).to(logits.dtype)
        logits.index_put_((rows, last), change, accumulate=True)


_MOST = torch.finfo(torch.float32).max
_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Columns [n, 1] float32 of the rows whose logits depend on the tokens so far."""

    at: torch.Tensor  # [n] int64
    prompt_tokens: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


class SamplingBatch:
    """The parameters of rows that are sampled together; reused for as long as the same rows are.

    The batch is made on the host. The first sample, or `prepare` before it, copies its tensors to the device.
    """

    def __init__(
        self,
        rows: Sequence[SampledRow],
        vocab_size: int,
        device: torch.device,
        followers: Sequence[RowFollower | None] = (),
    ) -> None:
        self.rows, self._followers = tuple(rows), tuple(followers) if any(followers) else ()
        self._device, self._vocab_size = device, vocab_size
        self._penalised = _where([row.penalised for row in rows])
        self._asking = _where([row.params.logprobs is not None for row in rows])
        self._random = _where([not row.greedy for row in rows])
        self._seeds = np.array([row.params.seed & _WORD for row in rows if not row.greedy], dtype=np.uint64)
        self._truncated = _where([row.truncated for row in rows if not row.greedy])
        self._bias = self._entries([row.params.logit_bias for row in rows])
        until = [row.prompt_tokens + row.params.min_tokens if row.params.min_tokens else 0 for row in rows]
        self._ends = self._entries(
            [tuple((t, float(u)) for t in row.early_ends) for row, u in zip(rows, until, strict=True)]
        )
        followed = [each is not None for each in self._followers or (None,) * len(rows)]
        masked = [row.masked and not by_itself for row, by_itself in zip(rows, followed, strict=True)]
        self.constrained = _where(masked)
        """The masked rows without a follower: where there are any, `at` needs masks."""
        closed = [(at, *both) for at, row in enumerate(self.constrained) for both in rows[row].closed_ends(vocab_size)]
        self._closed = [np.array(each, dtype=np.int64) for each in zip(*closed, strict=True)]
        words = [(row, word) for row, each in enumerate(rows) for word in each.bad_words(vocab_size)]
        self._words = BadWords(words, [row.prompt_tokens for row in rows]) if words else None
        adjusted = (
            len(self._penalised),
            any(row.masked for row in rows),
            self._bias[0].size,
            self._ends[0].size,
            len(words),
        )
        self.plain = not (len(self._asking) or len(self._random) or any(adjusted))
        self._prepared = False
        self.native: NativeRows | None = None
        """The rows for the native library, once prepared, where that samples."""
        # [S], 0 for greedy rows; None where some row needs more than a temperature.
        self.temperatures: npt.NDArray[np.float32] | None = None
        if not (len(self._asking) or len(self._truncated) or any(adjusted)):
            wanted = [0.0 if row.greedy else row.params.temperature for row in rows]
            self.temperatures = np.array(wanted, dtype=np.float32)

    def at(self, positions: Int64Array, batch_index: Int32Array, masks: GrammarBitmask | None = None) -> SamplePoint:
        """Return the inputs for sampling the tokens at `positions` [S], after those at `batch_index` [S]."""
        rows, ids, until = self._ends
        if rows.size:
            early = positions[rows] < until
            rows, ids = rows[early], ids[early]
        return SamplePoint(positions, batch_index, self._random, self._seeds, rows, ids, masks)

    def prepare(self) -> None:
        if self._prepared:
            return
        self._prepared = True
        if self._device.type == "cpu":
            self.native = native_rows(self.rows, self._vocab_size, self._followers)
        if self.native is not None or self.plain:
            return
        random_rows, cut = [self.rows[row].params for row in self._random], self._truncated
        self._penalties = self._penalties_of([self.rows[row] for row in self._penalised])
        self._biases = [self._tensor(each) for each in self._bias]
        self._closed_at = [self._tensor(each) for each in self._closed]
        if self._words is not None:
            self._words.move(self._device)
        self._random_at, self._truncated_at = self._tensor(self._random), self._tensor(cut)
        self._asking_at, self._constrained_at = self._tensor(self._asking), self._tensor(self.constrained)
        self._temperature = self._column([p.temperature for p in random_rows])
        self._bounds = Truncation.of([random_rows[row] for row in cut], self._device) if len(cut) else None

    def sample(self, logits: torch.Tensor, point: SamplePoint, table: torch.Tensor) -> SampledTokens:
        """Sample a token for every row; overwrites logits [S, vocab] float32.

        `table` [max_num_seqs, width] has the tokens so far.
        """
        self.prepare()
        if self.native is not None:
            threads = torch.get_num_threads()
            native = NativeSample(self.native, point.positions, point.batch_index, table, threads, point.masks)
            native.run(logits)
            return self.sampled(native)
        if self.plain:
            return SampledTokens(_first_best(logits))
        self._adjust(logits, point, table)
        tokens = _first_best(logits)
        if len(self._random):
            whole = len(self._random) == len(self.rows)
            sampled = self._sample_random(logits if whole else logits[self._random_at], self._tensor(point.uniform))
            tokens = sampled if whole else tokens.index_copy_(0, self._random_at, sampled)
        return SampledTokens(tokens, self._logprobs(logits, tokens) if len(self._asking) else None)

    def sampled(self, native: NativeSample) -> SampledTokens:
        at = self._asking
        arrays = native.logprobs[at], native.top_ids[at], native.top[at]
        found = RowLogprobs(at, *map(torch.from_numpy, arrays)) if len(at) else None
        return SampledTokens(torch.from_numpy(native.tokens), found, ended=native.ended, forced=native.forced)

    def _adjust(self, logits: torch.Tensor, point: SamplePoint, table: torch.Tensor) -> None:
        """Apply everything that comes before log-probabilities, in place."""
        if self._penalties is not None:
            at, known = self._penalties.at, point.positions[self._penalised]
            tokens = table[self._tensor(point.batch_index[self._penalised]).long(), : int(known.max())].long()
            logits[at] = _penalise(logits[at], self._penalties, tokens, self._tensor(known)[:, None])
        rows, ids, values = self._biases
        if len(rows):
            logits.index_put_((rows, ids), values.to(logits.dtype), accumulate=True)
        if point.masks is not None:
            self._forbid(logits, point.masks)
        if self._words is not None:
            self._words.forbid(logits, table, self._tensor(point.batch_index), self._tensor(point.positions))
        if point.early_rows.size:
            logits[self._tensor(point.early_rows), self._tensor(point.early_ids)] = float("-inf")

    def _forbid(self, logits: torch.Tensor, masks: GrammarBitmask) -> None:
        """Wait for the masks, and forbid all tokens outside them: one transfer of a bit for each logit."""
        masks.wait()
        allowed = self._tensor(masks.bits.view(np.int32))  # [C, words]
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        bits = ((allowed[:, :, None] >> shifts) & 1).flatten(1)[:, : self._vocab_size]
        at = self._constrained_at
        picked = logits[at]
        if self._closed_at:
            rows, ends, closing = self._closed_at
            values = picked[rows, ends].masked_fill_(bits[rows, ends] != 0, float("-inf"))
            picked.view(-1).scatter_reduce_(0, rows * picked.shape[1] + closing, values, "amax")
        logits[at] = picked.masked_fill_(bits == 0, float("-inf"))

    def _sample_random(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Return one token for each of n random rows; logits [n, vocab], uniform [n] float64."""
        scaled = (logits / self._temperature).clamp_max_(_MOST)  # a low temperature makes infinities of large logits
        if self._bounds is None:
            return invert(scaled, None, uniform)
        if len(self._truncated) == len(scaled):
            return sample_truncated(scaled, self._bounds, uniform)
        at = self._truncated_at
        cut = sample_truncated(scaled[at], self._bounds, uniform[at])
        return invert(scaled, None, uniform).index_copy_(0, at, cut)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> RowLogprobs:
        logprobs = logits[self._asking_at].log_softmax(dim=-1)
        count = max(self.rows[row].params.top_count for row in self._asking)
        top, top_ids = best_tokens(logprobs, min(count, self._vocab_size))
        for at, row in enumerate(self._asking):
            if listed := self.rows[row].params.logprob_token_ids:
                ids = sent(torch.tensor(listed, dtype=top_ids.dtype), self._device)
                top_ids[at, : len(listed)], top[at, : len(listed)] = ids, logprobs[at, ids.long()]
        sampled = logprobs.gather(1, tokens[self._asking_at][:, None])[:, 0]
        return RowLogprobs(self._asking, sampled, top_ids, top)

    def _penalties_of(self, rows: Sequence[SampledRow]) -> _Penalties | None:
        if not rows:
            return None
        return _Penalties(
            self._tensor(self._penalised),
            self._column([float(row.prompt_tokens) for row in rows]),
            self._column([row.params.repetition_penalty for row in rows]),
            self._column([row.params.frequency_penalty for row in rows]),
            self._column([row.params.presence_penalty for row in rows]),
        )

    def _entries(self, of_rows: Sequence[tuple[tuple[int, float], ...]]) -> tuple[Int64Array, Int64Array, Float64Array]:
        """Return (row, token id, value) of every entry whose id is in the vocabulary."""
        flat = [(row, i, v) for row, entries in enumerate(of_rows) for i, v in entries if 0 <= i < self._vocab_size]
        rows, ids, values = zip(*flat, strict=True) if flat else ((), (), ())
        return np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)

    def _tensor(self, array: Int32Array | Int64Array | Float64Array) -> torch.Tensor:
        return sent(torch.from_numpy(array), self._device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=torch.float32), self._device)[:, None]


def _where(flags: Sequence[bool]) -> Int64Array:
    return np.flatnonzero(np.array(flags, dtype=bool))


def _first_best(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely token of each row, [S], the first of equal ones.

    On a CPU by numpy, in a fourth to a twelfth of the time that torch takes (32 000 tokens, 3 threads and 1).
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _penalise(logits: torch.Tensor, penalties: _Penalties, tokens: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return logits [n, vocab] less penalties for tokens [n, M], of which known [n, 1] count."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    of_output = (index < known) & (index >= penalties.prompt_tokens)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, (index < known).to(logits.dtype))
    output = torch.zeros_like(logits).scatter_add_(1, tokens, of_output.to(logits.dtype))
    less_likely = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where(counts > 0, less_likely, logits)
    logits -= output * penalties.frequency
    logits -= (output > 0).to(logits.dtype) * penalties.presence
    return logits.clamp_(-_MOST, _MOST)  # an extreme penalty makes infinities, of which no distribution can be made


def token_logprobs(sampled: SampledTokens, batch: SamplingBatch) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of each row whose request includes them, by its index in the batch."""
    found = sampled.logprobs
    if found is None:
        return {}
    tokens, own = sampled.tokens.tolist(), found.sampled.tolist()
    ids, values = found.top_ids.tolist(), found.top.tolist()
    result = {}
    for n, row in enumerate(found.rows.tolist()):
        params = batch.rows[row].params
        best = zip(ids[n][: params.top_count], values[n][: params.top_count], strict=True)
        if params.logprob_token_ids:
            others = [each for each in best if each[0] != tokens[row]]
            top = ((tokens[row], own[n]), *others)
        else:
            top = tuple([each for each in best if each[1] > -math.inf])
        result[row] = TokenLogprobs(tokens[row], own[n], top)
    return result
