"""Outputs on their way to one router: collected while the stream's writer is busy, packed when it is free.

A slow router therefore gets fewer, larger messages, up to the size at which the next message begins. Memory grows with
its backlog of tokens, not of steps; `size` counts it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from common.contracts.hashing import little_endian_int32
from common.contracts.lease import Admit
from common.contracts.limits import MAX_OUTPUT_MESSAGE_BYTES
from common.contracts.transfers import Fetched
from common.contracts.types import TokenLogprobs
from common.wire.enum_codec import finish_to_proto, miss_to_proto
from common.wire.output_codec import logprobs_to_proto, usage_to_proto
from common.wire.packing import pack_u32
from gpuworker.engine.ports import Started
from gpuworker.scheduling.outcomes import SequenceFinished
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types

# Bytes of an event, and of each token or log-probability in it, on the wire; upper bounds.
_EVENT_BYTES: Final = 256
_ROW_BYTES, _TOKEN_BYTES, _TURN_BYTES = 8, 4, 32
_LOGPROBS_BYTES, _TOP_BYTES = 64, 16
_MESSAGE_CHARS: Final = 1_000  # of an error that ends a sequence
_ENTRIES_AT_ONCE: Final = 32


def _bytes_of(logprobs: Sequence[TokenLogprobs]) -> int:
    return _LOGPROBS_BYTES * len(logprobs) + _TOP_BYTES * sum(len(one.top) for one in logprobs)


class Waited(NamedTuple):
    """How long a sequence waited at this worker for its blocks, and how much of that the worker lost.

    When its submit was read, the worker had stood still for `unread` seconds.
    """

    seconds: float = 0.0
    lost: float = 0.0
    unread: float = 0.0


class OutputBuffer:
    """Collects the events of the sequences of one stream, by handle. `size` is what was not taken yet, in bytes."""

    def __init__(self) -> None:
        self._seq = 0
        # The present turn: when it was over and what the worker had lost; and its place in the message once it has one.
        self._turn, self._turn_place = (0.0, 0.0), 0
        self._sealed: deque[tuple[int, pb.StepOutputs]] = deque()
        self.size = 0
        self._clear()

    def _clear(self) -> None:
        self._step, self._gathered = 0, 0
        self._turns: list[pb.EngineTurn] = []
        self._turn_place = 0
        self._handles, self._counts, self._tokens = array("I"), array("I"), array("i")
        self._logprob_handles, self._preempted = array("I"), array("I")
        self._logprobs: list[types.TokenLogprobs] = []
        self._prompt_logprobs: list[types.TokenLogprobs] = []
        self._prompt_handles = array("I")
        self._admitted: list[pb.SequenceAdmitted] = []
        self._started: list[pb.SequenceStarted] = []
        self._delayed: list[pb.SequenceDelayed] = []
        self._finished: list[pb.SequenceFinished] = []

    def __bool__(self) -> bool:
        return self.size > 0

    def begin_turn(self, at: float, lost: float) -> None:
        """Let all that follows be of the engine's turn that was over then; 0: it is put out once more, and of none."""
        self._turn, self._turn_place = (at, lost), 0

    def _in_turn(self) -> int:
        """Return the place of the present turn in the message, from 1 on; 0 for what is of none."""
        at, lost = self._turn
        if not self._turn_place and (at or self._turns):
            self._turns.append(pb.EngineTurn(at_seconds=at, lost_seconds=lost, first_row=len(self._handles)))
            self._turn_place = len(self._turns)
            self._gathered += _TURN_BYTES
            self.size += _TURN_BYTES
        return self._turn_place

    def tokens(self, step: int, handle: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append new tokens of a sequence, and their log-probabilities if it asked for them."""
        self._step = step
        self._in_turn()
        self._handles.append(handle)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)
        for one in logprobs:
            self._logprob_handles.append(handle)
            self._logprobs.append(logprobs_to_proto(one))
        self._grow(_ROW_BYTES + _TOKEN_BYTES * len(tokens) + _bytes_of(logprobs))

    def prompt_logprobs(self, handle: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Append the next log-probabilities of a prompt, in parts that do not fill a message."""
        for start in range(0, len(logprobs), _ENTRIES_AT_ONCE):
            part = logprobs[start : start + _ENTRIES_AT_ONCE]
            self._prompt_handles.extend([handle] * len(part))
            self._prompt_logprobs.extend(map(logprobs_to_proto, part))
            self._grow(_bytes_of(part))

    def admitted(self, handle: int, admit: Admit, waited: Waited) -> None:
        self._admitted.append(
            pb.SequenceAdmitted(
                handle=handle,
                cached_tokens=admit.cached_tokens,
                miss_reason=miss_to_proto(admit.miss_reason),
                diverged_at=admit.diverged_at,
                decision_id=admit.decision_id,
                reserve_seconds=waited.seconds,
                lost_seconds=waited.lost,
                unread_seconds=waited.unread,
                turn=self._in_turn(),
                fetched=None if admit.fetched is None else _fetched_to_proto(admit.fetched),
            )
        )
        source = "" if admit.fetched is None else admit.fetched.source
        self._grow(_EVENT_BYTES + len(admit.decision_id) + len(source))

    def recounted(self, handle: int, cached_tokens: int) -> None:
        """Append the cached tokens of a sequence whose admission said another number."""
        again = pb.SequenceAdmitted(handle=handle, cached_tokens=cached_tokens, recounted=True, turn=self._in_turn())
        self._admitted.append(again)
        self._grow(_EVENT_BYTES)

    def started(self, handle: int, started: Started) -> None:
        _, wait_seconds, ahead_tokens, ahead_of, loaded, spared_seconds = started
        message = pb.SequenceStarted(
            handle=handle,
            wait_seconds=wait_seconds,
            ahead_tokens=ahead_tokens,
            ahead_of=ahead_of,
            turn=self._in_turn(),
            loaded_blocks=loaded.blocks,
            load_seconds=loaded.seconds,
            spared_seconds=spared_seconds,
        )
        self._started.append(message)
        self._grow(_EVENT_BYTES + len(ahead_of))

    def delayed(self, handle: int, compiled: float = 0.0, stalled: float = 0.0, away: float = 0.0) -> None:
        """Append the seconds for which a sequence was held up."""
        self._delayed.append(
            pb.SequenceDelayed(
                handle=handle,
                compile_seconds=compiled,
                stalled_seconds=stalled,
                manager_away_seconds=away,
                turn=self._in_turn(),
            )
        )
        self._grow(_EVENT_BYTES)

    def preempted(self, handle: int) -> None:
        self._in_turn()
        self._preempted.append(handle)
        self._grow(_ROW_BYTES)

    def finished(self, handle: int, end: SequenceFinished) -> None:
        self._finished.append(
            pb.SequenceFinished(
                handle=handle,
                reason=finish_to_proto(end.reason),
                usage=usage_to_proto(end.usage),
                stop_token_id=end.stop_token,
                message=end.message[:_MESSAGE_CHARS],
                wrong_field=end.wrong_field,
                embedding=end.embedding,
                turn=self._in_turn(),
            )
        )
        self._grow(_EVENT_BYTES + len(end.embedding) + 4 * min(len(end.message), _MESSAGE_CHARS))

    def take_outputs(self) -> pb.StepOutputs:
        """Return what was gathered first, as one message, and forget it."""
        if not self._sealed:
            self._seal()
        size, message = self._sealed.popleft()
        self.size -= size
        return message

    def clear(self) -> None:
        """Forget everything."""
        self._sealed.clear()
        self.size = 0
        self._clear()

    def _grow(self, size: int) -> None:
        self._gathered += size
        self.size += size
        if self._gathered >= MAX_OUTPUT_MESSAGE_BYTES:
            self._seal()

    def _seal(self) -> None:
        """Pack everything gathered into a message."""
        self._seq += 1
        message = pb.StepOutputs(
            seq=self._seq,
            step=self._step,
            admitted=self._admitted,
            handles=pack_u32(self._handles),
            counts=pack_u32(self._counts),
            token_ids=little_endian_int32(self._tokens),
            logprobs=self._logprobs,
            logprob_handles=pack_u32(self._logprob_handles),
            finished=self._finished,
            preempted=pack_u32(self._preempted),
            prompt_logprobs=self._prompt_logprobs,
            prompt_logprob_handles=pack_u32(self._prompt_handles),
            started=self._started,
            delayed=self._delayed,
            turns=self._turns,
        )
        self._sealed.append((self._gathered, message))
        self._clear()


def _fetched_to_proto(fetched: Fetched) -> pb.Fetched:
    return pb.Fetched(blocks=fetched.blocks, asked=fetched.asked, seconds=fetched.seconds, source=fetched.source)
