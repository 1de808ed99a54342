"""Samples from a distribution, or from its likely part: top_k, top_p, min_p.

The result of a row depends on that row alone, to the last bit. Every sum runs along one row, in order of token id or of
falling probability. Omitted entries count as zeros, which change no partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.contracts.types import SamplingParams
from gpuworker.memory.devices import sent

_SORTED_FIRST, _WIDEN = 256, 8  # how many of the best tokens are sorted first, and by which factor more if need be


@dataclass(frozen=True, slots=True)
class Truncation:
    """The bounds of n rows; float64 columns [n, 1], infinite where there is no such bound.

    `widest` is the largest top_k; `of_whole`: some row's top_p is a share of the whole vocabulary; `unbounded`: some
    row has no top_k.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    widest: int
    of_whole: bool
    unbounded: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> Truncation:
        def column(values: list[float]) -> torch.Tensor:
            return sent(torch.tensor(values, dtype=torch.float64), device)[:, None]

        return Truncation(
            column([float(p.top_k or math.inf) for p in params]),
            column([p.top_p if p.top_p < 1.0 else math.inf for p in params]),
            column([p.min_p for p in params]),
            max(p.top_k for p in params),
            any(p.top_p < 1.0 and not p.top_k for p in params),
            any(not p.top_k for p in params),
        )

    def rows(self, index: torch.Tensor) -> Truncation:
        bounds = self.top_k[index], self.top_p[index], self.min_p[index]
        return Truncation(*bounds, self.widest, self.of_whole, self.unbounded)


def sample_truncated(
    scaled: torch.Tensor, bounds: Truncation, uniform: torch.Tensor, sort_first: int = _SORTED_FIRST
) -> torch.Tensor:
    """Return one token a row, sampled from a part of the vocabulary; scaled [n, vocab] is logits over temperature.

    The part is cut in order of falling probability, ties by rising id: the first top_k; of those the fewest whose share
    reaches top_p; of those the ones that are at least min_p times as likely as the first.

    Only the best `sort_first` are sorted at first, and more for the rows that may keep more. Off the CPU no step waits
    for the host: if some row has no top_k, all is sorted at once; if every row has one, tokens outside the best that
    tie with the last kept token count as less likely.
    """
    vocab, in_one_go = scaled.shape[1], scaled.device.type != "cpu"
    width = vocab if in_one_go and bounds.unbounded else min(vocab, max(sort_first, bounds.widest))
    best, ids = scaled.topk(width, dim=-1)
    counts = _kept_counts(best, scaled, bounds)
    last = best.gather(1, counts[:, None] - 1)
    tokens = _draw_kept(best, ids, counts, uniform)
    if width == vocab or in_one_go:
        return tokens
    beyond = ((counts >= width) | (best[:, -1] == last[:, 0])).nonzero()[:, 0]
    if len(beyond):
        wider = _WIDEN * width if _WIDEN * width < vocab // 4 else vocab
        tokens[beyond] = sample_truncated(scaled[beyond], bounds.rows(beyond), uniform[beyond], wider)
    return tokens


def invert(scaled: torch.Tensor, kept: torch.Tensor | None, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index [n] at which the cumulative share of exp(scaled) [n, K] exceeds uniform [n]."""
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()
    if kept is not None:
        weights *= kept
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(scaled.shape[1] - 1)


def _draw_kept(best: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample from the first counts [n] of the best [n, K], ties by rising id."""
    last = best.gather(1, counts[:, None] - 1)
    ids, order = ids.sort(dim=1)
    values = best.gather(1, order)
    tied = values == last
    ties_kept = counts[:, None] - (values > last).sum(dim=1, keepdim=True)
    kept = (values > last) | (tied & (tied.cumsum(dim=1) <= ties_kept))
    return ids.gather(1, invert(values, kept, uniform)[:, None])[:, 0]


def _kept_counts(best: torch.Tensor, scaled: torch.Tensor, bounds: Truncation) -> torch.Tensor:
    """Return how many of the best tokens [n, K], in falling order, each row keeps; K means K or more."""
    width = best.shape[1]
    weights = (best - best[:, :1]).double().exp()
    reached = weights.cumsum(dim=1)
    # What the shares are of: the first top_k, or the whole vocabulary, summed in order of token id.
    share = reached.gather(1, (bounds.top_k - 1).clamp_max(width - 1).long())
    if bounds.of_whole:
        whole = (scaled - best[:, :1]).exp_().cumsum(dim=1, dtype=torch.float64)[:, -1:]
        share = torch.where(torch.isinf(bounds.top_k), whole, share)
    in_top_k = torch.arange(width, device=best.device) < bounds.top_k
    nucleus = reached - weights < bounds.top_p * share
    likely = weights >= bounds.min_p
    return (in_top_k & nucleus & likely).sum(dim=1).clamp_min(1)
