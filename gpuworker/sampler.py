"""Draws the next token of each row from its logits.

Order: repetition penalty (prompt and output), frequency and presence penalty (output), bias, forbidden end tokens;
then log-probabilities are taken; then temperature, top_k, top_p, min_p, and the draw. A draw inverts the cumulative
distribution, in order of token id and in float64, at one number in [0, 1) that is a hash of (seed, position): whoever
shares the batch, whichever worker runs the sequence, the same logits give the same token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.types import SamplingParams, TokenLogprobs

_GREEDY_BELOW = 1e-5  # a temperature this low is greedy: dividing by less overflows float32
_SORTED_FIRST, _WIDEN = 256, 8  # how many of the best tokens are sorted first, and by which factor more if need be
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What drawing for one sequence needs to know besides logits: its parameters, and the ids that may end it."""

    params: SamplingParams
    prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True when logits depend on the tokens so far."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def truncated(self) -> bool:
        """True when the draw is from a part of the vocabulary."""
        return not self.greedy and (self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that are forbidden before min_tokens."""
        of_model = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*of_model, *self.params.stop_token_ids)))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of the rows that asked for them; n rows, k tokens each."""

    rows: npt.NDArray[np.int64]  # [n], index into the batch
    drawn: torch.Tensor  # [n]
    top_ids: torch.Tensor  # [n, k], best first
    top: torch.Tensor  # [n, k]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, still on the device."""

    tokens: torch.Tensor  # [S] int64
    logprobs: RowLogprobs | None = None


class SamplingBatch:
    """The parameters of rows that are sampled together, as tensors; reused for as long as the same rows are."""

    def __init__(self, rows: Sequence[SampledRow], vocab_size: int, device: torch.device) -> None:
        self.rows = tuple(rows)
        self._device, self._vocab_size = device, vocab_size
        self._seeds = np.array([row.params.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64)
        self._penalised = self._where([row.penalised for row in rows])
        self._asking = self._where([row.params.logprobs is not None for row in rows])
        self._drawing = self._where([not row.greedy for row in rows])
        self._truncated = self._where([row.truncated for row in rows if not row.greedy])
        self._bias = self._entries([row.params.logit_bias for row in rows])
        until = [row.prompt_tokens + row.params.min_tokens if row.params.min_tokens else 0 for row in rows]
        self._ends = self._entries(
            [tuple((t, float(u)) for t in row.end_tokens) if u else () for row, u in zip(rows, until, strict=True)]
        )
        self.plain = not (
            len(self._penalised) or len(self._asking) or len(self._drawing) or self._bias[0].size or self._ends[0].size
        )

    def sample(
        self, logits: torch.Tensor, positions: npt.NDArray[np.int64], table: torch.Tensor, seats: torch.Tensor
    ) -> Drawn:
        """Draw for every row; logits [S, vocab] float32 are overwritten.

        positions [S] are those of the tokens to draw; the tokens before them are table[seats[s], :positions[s]].
        """
        if self.plain:
            return Drawn(logits.argmax(dim=-1))
        self._adjust(logits, positions, table, seats)
        tokens = logits.argmax(dim=-1)
        if len(self._drawing):
            uniform = uniforms(self._seeds[self._drawing], positions[self._drawing])
            at = self._tensor(self._drawing)
            tokens[at] = self._draw(logits[at], self._tensor(uniform))
        return Drawn(tokens, self._logprobs(logits, tokens) if len(self._asking) else None)

    def _adjust(
        self, logits: torch.Tensor, positions: npt.NDArray[np.int64], table: torch.Tensor, seats: torch.Tensor
    ) -> None:
        """Apply everything that comes before log-probabilities, in place."""
        if len(self._penalised):
            at = self._tensor(self._penalised)
            known = positions[self._penalised]
            tokens = table[seats[at].long(), : int(known.max())].long()
            logits[at] = self._penalise(logits[at], tokens, self._tensor(known)[:, None])
        rows, ids, values = self._bias
        if rows.size:
            logits.index_put_(
                (self._tensor(rows), self._tensor(ids)), self._tensor(values).to(logits.dtype), accumulate=True
            )
        rows, ids, until = self._ends
        early = positions[rows] < until
        if early.any():
            logits[self._tensor(rows[early]), self._tensor(ids[early])] = float("-inf")

    def _penalise(self, logits: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] less penalties for tokens [n, M], of which known [n, 1] count."""
        rows = [self.rows[row] for row in self._penalised]
        index = torch.arange(tokens.shape[1], device=self._device)
        of_output = (index < known) & (index >= self._column([float(row.prompt_tokens) for row in rows]))
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, (index < known).to(logits.dtype))
        output = torch.zeros_like(logits).scatter_add_(1, tokens, of_output.to(logits.dtype))
        repetition = self._column([row.params.repetition_penalty for row in rows])
        less_likely = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, less_likely, logits)
        logits -= output * self._column([row.params.frequency_penalty for row in rows])
        logits -= (output > 0).to(logits.dtype) * self._column([row.params.presence_penalty for row in rows])
        return logits

    def _draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Return one token for each of n drawing rows; logits [n, vocab], uniform [n] float64."""
        params = [self.rows[row].params for row in self._drawing]
        scaled = logits / self._column([p.temperature for p in params])
        if not len(self._truncated):
            return _invert(scaled, None, uniform)
        at = self._tensor(self._truncated)
        cut = draw_truncated(scaled[at], [params[row] for row in self._truncated], uniform[at])
        if len(self._truncated) == len(params):
            return cut
        return _invert(scaled, None, uniform).index_copy_(0, at, cut)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> RowLogprobs:
        at = self._tensor(self._asking)
        logprobs = logits[at].log_softmax(dim=-1)
        count = max(self.rows[row].params.logprobs or 0 for row in self._asking)
        top, top_ids = logprobs.topk(min(count, self._vocab_size), dim=-1)
        return RowLogprobs(self._asking, logprobs.gather(1, tokens[at][:, None])[:, 0], top_ids, top)

    def _entries(
        self, of_rows: Sequence[tuple[tuple[int, float], ...]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return (row, token id, value) of every entry whose id is in the vocabulary."""
        flat = [(row, i, v) for row, entries in enumerate(of_rows) for i, v in entries if 0 <= i < self._vocab_size]
        rows, ids, values = zip(*flat, strict=True) if flat else ((), (), ())
        return np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)

    @staticmethod
    def _where(flags: Sequence[bool]) -> npt.NDArray[np.int64]:
        return np.flatnonzero(np.array(flags, dtype=bool))

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]


def draw_truncated(
    scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor, sort_first: int = _SORTED_FIRST
) -> torch.Tensor:
    """Return one token a row, drawn from a part of the vocabulary; scaled [n, vocab] is logits over temperature.

    In order of falling probability, ties by rising id: the first top_k; of those the fewest whose share reaches top_p;
    of those the ones that are at least min_p times as likely as the first. Only the best `sort_first` are sorted at
    first, and more for the rows that may keep more.
    """
    vocab = scaled.shape[1]
    width = min(vocab, max([sort_first, *(p.top_k for p in params)]))
    best, ids = scaled.topk(width, dim=-1)
    counts = _kept_counts(best, scaled, params)
    last = best.gather(1, counts[:, None] - 1)
    tokens = _draw_kept(best, ids, counts, uniform)
    if width == vocab:
        return tokens
    beyond = ((counts >= width) | (best[:, -1] == last[:, 0])).nonzero()[:, 0]
    if len(beyond):
        some = [params[row] for row in beyond.tolist()]
        wider = _WIDEN * width if _WIDEN * width < vocab // 4 else vocab
        tokens[beyond] = draw_truncated(scaled[beyond], some, uniform[beyond], wider)
    return tokens


def _draw_kept(best: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from the first counts [n] of the best [n, K], ties by rising id."""
    last = best.gather(1, counts[:, None] - 1)
    ids, order = ids.sort(dim=1)
    values = best.gather(1, order)
    tied = values == last
    ties_kept = counts[:, None] - (values > last).sum(dim=1, keepdim=True)
    kept = (values > last) | (tied & (tied.cumsum(dim=1) <= ties_kept))
    return ids.gather(1, _invert(values, kept, uniform)[:, None])[:, 0]


def _invert(scaled: torch.Tensor, kept: torch.Tensor | None, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index [n] at which the cumulative share of exp(scaled) [n, K] exceeds uniform [n]."""
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()
    if kept is not None:
        weights *= kept
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(scaled.shape[1] - 1)


def _kept_counts(best: torch.Tensor, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return how many of the best tokens [n, K], in falling order, each row keeps; K means K or more."""
    width = best.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=best.device)[:, None]

    top_k = column([float(p.top_k or scaled.shape[1]) for p in params])
    weights = (best - best[:, :1]).double().exp()
    total = (scaled - best[:, :1]).exp().sum(dim=1, keepdim=True, dtype=torch.float64)
    in_top_k = torch.arange(width, device=best.device) < top_k
    weights = weights * in_top_k
    limited = weights.sum(dim=1, keepdim=True)
    share = torch.where(top_k <= width, limited, total)
    before = weights.cumsum(dim=1) - weights
    nucleus = before < column([p.top_p if p.top_p < 1.0 else math.inf for p in params]) * share
    likely = weights >= column([p.min_p for p in params])
    return (in_top_k & nucleus & likely).sum(dim=1).clamp_min(1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, position): splitmix64, keyed twice."""
    with np.errstate(over="ignore"):
        hashed = _mix(_mix(seeds + _GOLDEN) ^ _mix(positions.astype(np.uint64) * _GOLDEN + _MIX_1))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def token_logprobs(drawn: Drawn, batch: SamplingBatch) -> dict[int, TokenLogprobs]:
    """Return what each row that asked for log-probabilities gets, by its index in the batch."""
    found = drawn.logprobs
    if found is None:
        return {}
    tokens, own = drawn.tokens.tolist(), found.drawn.tolist()
    ids, values = found.top_ids.tolist(), found.top.tolist()
    result = {}
    for n, row in enumerate(found.rows.tolist()):
        count = batch.rows[row].params.logprobs or 0
        result[row] = TokenLogprobs(tokens[row], own[n], tuple(zip(ids[n][:count], values[n][:count], strict=True)))
    return result
