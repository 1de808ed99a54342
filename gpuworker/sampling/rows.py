"""The rows of a step that sample a token: their parameters, where they stand in a step, and what they sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.types import SamplingParams
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.scheduling.splitmix64 import GOLDEN, MIX_1, MIX_2
from gpuworker.scheduling.stopping import FinishCause

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)


# The random numbers of samples: each depends on the seed and the position of its token alone.
def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, position): splitmix64, keyed twice."""
    with np.errstate(over="ignore"):
        hashed = _mix(_mix(seeds + _GOLDEN) ^ _mix(positions.astype(np.uint64) * _GOLDEN + _MIX_1))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `gpuworker.scheduling.splitmix64` of each word."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_GREEDY_BELOW = 1e-5  # a temperature this low is greedy: dividing by less overflows float32


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The sampling parameters of one sequence, and the token ids that may end it."""

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
        """True when only a part of the vocabulary may be sampled."""
        return not self.greedy and (self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0)

    @property
    def masked(self) -> bool:
        """True when a mask says which tokens may be sampled: under a constraint, or a budget of thoughts."""
        return self.params.constraint is not None or self.params.thought is not None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that are forbidden before min_tokens."""
        of_model = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*of_model, *self.params.stop_token_ids)))

    def bad_words(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Return the runs of tokens that the output may not have, those that could be sampled at all."""
        return [word for word in self.params.bad_words if word and all(0 <= token < vocab_size for token in word)]

    def closed_ends(self, vocab_size: int) -> list[tuple[int, int]]:
        """Return the ends of a text for which a closing token stands where a constraint forbids them, each with it."""
        closing = self.params.closing_token_id
        if closing is None or self.params.constraint is None:
            return []
        return [(end, closing) for end in self.end_tokens if 0 <= end < vocab_size]

    @property
    def early_ends(self) -> tuple[int, ...]:
        """The end tokens that are forbidden before min_tokens; none of a masked row, whose mask forbids them."""
        return self.end_tokens if self.params.min_tokens and not self.masked else ()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of the rows whose requests include them; n rows, k tokens each."""

    rows: Int64Array  # [n], index into the batch
    sampled: torch.Tensor  # [n]
    top_ids: torch.Tensor  # [n, k], best first
    top: torch.Tensor  # [n, k]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of K tokens of prompts, how many tokens are more likely plus one, and the k most likely."""

    logprobs: torch.Tensor  # [K]
    ranks: torch.Tensor  # [K]
    top_ids: torch.Tensor  # [K, k], best first
    top: torch.Tensor  # [K, k]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row, still on the device, and the scores of prompts where the step has any.

    A step that embeds has vectors in place of both.
    """

    tokens: torch.Tensor  # [S] int64
    logprobs: RowLogprobs | None = None
    scores: PromptScores | None = None
    pooled: torch.Tensor | None = None  # [S, hidden_size] float32
    ended: Mapping[int, FinishCause] = field(default_factory=dict)
    """The rows whose followers let no token follow: their samples are discarded."""
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """What constraints force to follow the samples, by the first row of a sequence."""


@dataclass(frozen=True, slots=True)
class SamplePoint:
    """The rows of a batch at one step, on the host: D of S rows sample at random, E end tokens are too early.

    `seeds` [D] are those of the rows `random` [D].
    `masks` belong to the rows with a constraint; the mask thread may still be filling them.

    `positions` [S] are those of the tokens to sample. The tokens before them are in the token table, at
    [batch_index[s], :positions[s]].
    """

    positions: Int64Array
    batch_index: Int32Array
    random: Int64Array  # [D]
    seeds: npt.NDArray[np.uint64]  # [D]
    early_rows: Int64Array  # [E]
    early_ids: Int64Array  # [E]
    masks: GrammarBitmask | None = None

    @property
    def uniform(self) -> Float64Array:
        """The numbers in [0, 1) of the D rows. The native sampler makes its own, so they are computed when asked."""
        return uniforms(self.seeds, self.positions[self.random])
