"""What a sequence has put out since its submit, kept so that another router can go on with it.

Tokens cost four bytes each. Log-probabilities are bounded in bytes: a client that lags behind its router by more has
lost them with the router.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from common.contracts.lease import Admit
from common.contracts.limits import MAX_KEPT_LOGPROBS_BYTES
from common.contracts.types import TokenLogprobs
from gpuworker.scheduling.outcomes import SequenceFinished
from gpuworker.server.output_buffer import OutputBuffer, Waited

# Bytes of an entry and of each likely token beside it, as CPython holds them (measured).
_ENTRY_BYTES: Final = 200
_LIKELY_BYTES: Final = 130
_TOKEN_BYTES: Final = 4
# Tokens of one part of a replay, without and with log-probabilities.
_PART_TOKENS: Final = 256
_PART_ENTRIES: Final = 32
_DROPPED: Final = TokenLogprobs(0, 0.0)


class KeptLogprobs:
    """The last entries of a list that grows. `dropped` counts those before them."""

    def __init__(self) -> None:
        self._entries: deque[TokenLogprobs] = deque()
        self.dropped = 0
        self.bytes = 0

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._entries.append(entry)
            self.bytes += _size(entry)
        while self.bytes > MAX_KEPT_LOGPROBS_BYTES:
            self.bytes -= _size(self._entries.popleft())
            self.dropped += 1

    def whole(self) -> Sequence[TokenLogprobs]:
        """Return all entries in order, with empty ones for those that were dropped."""
        return [_DROPPED] * self.dropped + list(self._entries)


def _size(entry: TokenLogprobs) -> int:
    return _ENTRY_BYTES + _LIKELY_BYTES * len(entry.top)


class KeptOutput:
    """Events of one sequence. Times are readings of time.monotonic, None until they have been."""

    __slots__ = (
        "admit",
        "admitted_at",
        "cached_tokens",
        "end",
        "first_token_at",
        "last_token_at",
        "logprobs",
        "reserve_seconds",
        "scored",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens = array("i")
        self.logprobs, self.scored = KeptLogprobs(), KeptLogprobs()
        self.admit: Admit | None = None
        self.cached_tokens: int | None = None
        self.reserve_seconds = 0.0
        self.end: SequenceFinished | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def bytes(self) -> int:
        return _TOKEN_BYTES * len(self.tokens) + self.logprobs.bytes + self.scored.bytes

    def admitted(self, admit: Admit, reserve_seconds: float, now: float) -> None:
        """Keep the first admission; later ones follow preemptions, which the end counts."""
        if self.admit is None:
            self.admit, self.reserve_seconds, self.admitted_at = admit, reserve_seconds, now

    def sampled(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> None:
        self.tokens.extend(tokens)
        if logprobs:
            self.logprobs.extend(logprobs)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def replay(self, handle: int, to: OutputBuffer) -> None:
        """Put out everything again, for another router."""
        to.begin_turn(0.0, 0.0)
        if self.admit is not None:
            to.admitted(handle, self.admit, Waited(self.reserve_seconds))
        if self.cached_tokens is not None:
            to.recounted(handle, self.cached_tokens)
        if scored := self.scored.whole():
            to.prompt_logprobs(handle, scored)
        logprobs = self.logprobs.whole()
        size = _PART_ENTRIES if logprobs else _PART_TOKENS
        for start in range(0, len(self.tokens), size):
            part = slice(start, start + size)
            to.tokens(0, handle, self.tokens[part], logprobs[part])
        if self.end is not None:
            to.finished(handle, self.end)
