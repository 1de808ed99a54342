"""A sequence that some router waits for, and how the engine's outputs reach it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from common.contracts.lease import Admit
from common.contracts.limits import MAX_KEPT_LOGPROBS_BYTES
from common.contracts.types import FinishReason, SequenceId, TokenLogprobs
from common.process.standstill import Standstill
from gpuworker.engine.ports import EngineOutputs, Started
from gpuworker.scheduling.outcomes import SequenceFinished
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.server.output_buffer import OutputBuffer, Waited
from gpuworker.server.spans import SequenceSpans
from gpuworker.structured.grammars import Grammar
from quire.gpuworker.v1 import gpuworker_pb2 as pb

# Bytes of an entry and of each likely token beside it, as CPython holds them (measured).
_ENTRY_BYTES: Final = 200
_LIKELY_BYTES: Final = 130
_TOKEN_BYTES: Final = 4
# Tokens of one part of a replay, without and with log-probabilities.
_PART_TOKENS: Final = 256
_PART_ENTRIES: Final = 32
_DROPPED: Final = TokenLogprobs(0, 0.0)


# What a sequence has put out since its submit, kept so that another router can go on with it.
# Tokens cost four bytes each. Log-probabilities are bounded in bytes: a client that lags behind its router by more
# has lost them with the router.
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


@dataclass(slots=True)
class LiveSequence:
    """A sequence and the handle that its router's stream gave it; its grammar stays compiled meanwhile.

    `message` is the submit as it came, and `size` its bytes. `kept` is None where no other router may go on with it.
    `compiled` are the seconds for which its constraint was compiled, until its router has them. `standstill` knows when
    the worker did not run.
    `handed_over`: its router lets it go on at another worker, which may not have it yet.
    """

    handle: int
    new: NewSequence
    submitted: float
    message: pb.Submit
    size: int
    grammar: Grammar | None = None
    spans: SequenceSpans | None = None
    deadline: asyncio.TimerHandle | None = None
    compiled: float = 0.0
    handed_over: bool = False
    release_adapter: Callable[[], None] | None = None
    """What counts the end of its use of an adapter."""
    standstill: Standstill = field(default_factory=Standstill)
    kept: KeptOutput | None = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptOutput() if self.message.HasField("continuation") else None

    @property
    def id(self) -> SequenceId:
        return self.new.sequence

    @property
    def request(self) -> tuple[str, str]:
        """The tenant and the id of the request: its name among all requests."""
        return self.message.tenant, self.message.request_id

    def waited(self, now: float) -> Waited:
        """Return how long it has waited until its admission, which is now."""
        still, came = self.standstill, self.submitted
        return Waited(max(0.0, now - came), still.between(came, now), still.just_before(came))

    @property
    def ended(self) -> bool:
        return self.kept is not None and self.kept.end is not None

    @property
    def bytes(self) -> int:
        """What it holds in memory for another router."""
        return self.size + (self.kept.bytes if self.kept is not None else 0)

    def close(self, end: SequenceFinished) -> None:
        """Release what belongs to a sequence that runs."""
        self.grammar = None
        if self.release_adapter is not None:
            self.release_adapter()
            self.release_adapter = None
        # One that ended by itself, while its router took it back, goes on nowhere.
        self.handed_over = self.handed_over and end.reason is FinishReason.CANCELLED
        if self.deadline is not None:
            self.deadline.cancel()
        if self.spans is not None:
            self.spans.finished(end)


class Outputs(Protocol):
    """Takes outputs by handle."""

    def begin_turn(self, at: float, lost: float) -> None: ...

    def tokens(self, step: int, handle: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None: ...

    def prompt_logprobs(self, handle: int, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def admitted(self, handle: int, admit: Admit, waited: Waited) -> None: ...

    def recounted(self, handle: int, cached_tokens: int) -> None: ...

    def started(self, handle: int, started: Started) -> None: ...

    def delayed(self, handle: int, compiled: float = 0.0, stalled: float = 0.0, away: float = 0.0) -> None: ...

    def preempted(self, handle: int) -> None: ...

    def finished(self, handle: int, end: SequenceFinished) -> None: ...


def gather(live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs, to: Outputs) -> None:
    """Put out what is of these sequences, in the order in which a router must see it, and keep it."""
    now = outputs.at or time.monotonic()
    to.begin_turn(outputs.at, outputs.lost)
    for delay in outputs.delayed:
        if (one := live.get(delay.sequence)) is not None:
            to.delayed(one.handle, stalled=delay.stalled, away=delay.away)
    _gather_admissions(live, outputs, to, now)
    _trace_chunks(live, outputs)
    for started in outputs.started:
        if (one := live.get(started.sequence)) is not None:
            to.started(one.handle, started)
            if one.spans is not None and started.loaded.blocks:
                one.spans.loaded(started.loaded)
    _gather_prompt_logprobs(live, outputs, to)
    _gather_tokens(live, outputs, to, now)
    _gather_ends(live, outputs, to)


def _trace_chunks(live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs) -> None:
    for chunk in outputs.chunks:
        one = live.get(chunk.sequence)
        if one is not None and one.spans is not None:
            one.spans.chunk(chunk)


def _gather_prompt_logprobs(live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs, to: Outputs) -> None:
    for sequence, entries in outputs.prompt_logprobs.items():
        if (one := live.get(sequence)) is not None:
            to.prompt_logprobs(one.handle, entries)
            if one.kept is not None:
                one.kept.scored.extend(entries)


def _gather_ends(live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs, to: Outputs) -> None:
    for sequence in outputs.preempted:
        if (one := live.get(sequence)) is not None:
            to.preempted(one.handle)
            if one.spans is not None:
                one.spans.preempted()
    for end in outputs.finished:
        if (one := live.get(end.sequence)) is not None:
            over_all = _over_all_runs(end, one.message.output_tokens_before)
            to.finished(one.handle, over_all)
            if one.kept is not None:
                one.kept.end = over_all


def _gather_admissions(
    live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs, to: Outputs, now: float
) -> None:
    for admit in outputs.admitted:
        if (one := live.get(admit.sequence)) is not None:
            waited = one.waited(now)
            if one.compiled:
                to.delayed(one.handle, compiled=one.compiled)
                one.compiled = 0.0
            to.admitted(one.handle, admit, waited)
            if one.kept is not None:
                one.kept.admitted(admit, waited.seconds, now)
            if one.spans is not None:
                one.spans.admitted(admit)
    for sequence, cached_tokens in outputs.recounted.items():
        if (one := live.get(sequence)) is not None:
            to.recounted(one.handle, cached_tokens)
            if one.kept is not None:
                one.kept.cached_tokens = cached_tokens


def _gather_tokens(live: Mapping[SequenceId, LiveSequence], outputs: EngineOutputs, to: Outputs, now: float) -> None:
    logprobs = dict(outputs.logprobs)  # with the first tokens of a sequence; there are several when two steps ended
    for sequence, tokens in outputs.tokens:
        if (one := live.get(sequence)) is not None:
            entries = logprobs.pop(sequence, ())
            to.tokens(outputs.step, one.handle, tokens, entries)
            if one.kept is not None:
                one.kept.sampled(tokens, entries, now)


def _over_all_runs(end: SequenceFinished, output_before: int) -> SequenceFinished:
    """Count the output of an earlier run of the sequence as output, although this run got it in its prompt."""
    if not output_before:
        return end
    usage = end.usage
    prompt, output = usage.prompt_tokens - output_before, usage.output_tokens + output_before
    return replace(end, usage=replace(usage, prompt_tokens=prompt, output_tokens=output))
