"""Why a sequence ends without a command: end-of-sequence and stop tokens, and the limits on its length."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.contracts.types import FinishReason


@dataclass(frozen=True, slots=True)
class FinishCause:
    """Why a sequence ends: the part of `SequenceFinished` that a stop rule or a constraint decides.

    `wrong_field` names the field of the request that is to blame for an error; empty where it is none.
    """

    reason: FinishReason
    stop_token: int | None = None
    message: str = ""
    wrong_field: str = ""
    embedding: bytes = b""
    """The pooled vector of a sequence that embeds, in little-endian float32."""


LENGTH = FinishCause(FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class StopRule:
    """The conditions that end a sequence. Stop tokens count only from output token number `min_tokens` on.

    `eos_ids` are the checkpoint's end-of-sequence tokens, which `ignore_eos` switches off; `stop_token_ids` are the
    request's own. Stop *strings* are the router's task: only the router has the text.
    """

    max_tokens: int
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stopping: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ending = self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids
        object.__setattr__(self, "stopping", ending)

    def limit(self, prompt_tokens: int, max_len: int) -> int:
        """Return the length in tokens, prompt and output, at which the sequence ends in any case."""
        return min(max_len, prompt_tokens + self.max_tokens)

    def ending(self, token: int, output_tokens: int, length: int, limit: int) -> FinishCause | None:
        """Return how `token` ends the sequence, or None. Both counts include it."""
        if token in self.stopping and output_tokens >= self.min_tokens:
            return FinishCause(FinishReason.STOP, token)
        return LENGTH if length >= limit else None
