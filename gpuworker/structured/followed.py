"""One sequence whose tokens a mask limits: by a constraint, by a budget of thoughts, or by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.contracts.types import FinishReason
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.stopping import FinishCause
from gpuworker.scheduling.thought import ThoughtFollower
from gpuworker.structured.sequence import Constrained, allow, forbid

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Followed:
    """Only the mask thread uses it. `position` is that of the next token.

    What ends a thought by force comes before what the constraint allows; a constraint that lets the thought end there
    takes it in like any other token. Without a constraint, end tokens are forbidden before min_tokens here.
    """

    def __init__(
        self,
        row: SampledRow,
        output: Sequence[int],
        constrained: Constrained | None,
        thought: ThoughtFollower | None = None,
    ) -> None:
        self.position = row.prompt_tokens
        self._constrained, self._thought = constrained, thought
        self._ends, self._ends_from = row.end_tokens, row.prompt_tokens + row.params.min_tokens
        for token in output:
            self.consume(token)

    @property
    def ending(self) -> FinishCause | None:
        """Why no token follows."""
        return None if self._constrained is None else self._constrained.ending

    @property
    def matcher(self) -> LLMatcher | None:
        """What fills the mask before `settle`; None where nothing does."""
        return None if self._constrained is None or self._forced is not None else self._constrained.matcher

    def consume(self, token: int) -> None:
        """Take in the token at `position`."""
        constrained, thought = self._constrained, self._thought
        if constrained is not None:
            constrained.consume(token)
        if thought is not None:
            if constrained is not None:
                self._blame_budget()
            thought.take(token)
        self.position += 1

    @property
    def plain(self) -> bool:
        """Whether `settle` changes nothing of a mask that allows any token besides the ends of a text."""
        return self._thought is None and self._constrained is not None and self._constrained.plain

    def settle(self, bits: npt.NDArray[np.uint32]) -> None:
        """Make of what `matcher` has filled, [words], the tokens to sample."""
        if (forced := self._forced) is not None:
            bits[:] = 0
            allow(bits, [forced])
        elif self._constrained is not None:
            self._constrained.settle(bits)
        else:
            bits[:] = np.uint32(0xFFFFFFFF)
            if self.position < self._ends_from:
                forbid(bits, self._ends)

    def _blame_budget(self) -> None:
        """Name the budget as the fault where the constraint lets no thought end in the middle of it."""
        assert self._constrained is not None
        ending = self._constrained.ending
        if self._forced is not None and ending is not None and ending.reason is FinishReason.ERROR:
            self._constrained.ending = replace(ending, wrong_field=ending.wrong_field or "thought_budget")

    @property
    def _forced(self) -> int | None:
        return None if self._thought is None else self._thought.forced
