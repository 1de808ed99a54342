"""The inbox of a request's events, and the order in which streams wake up to send them.

A step of a worker brings a token for every stream at once. If all streams woke at once, the event loop would write for
10 ms (400 streams) before it reads its sockets again: new requests would wait, and steps that come faster than they can
be written would pile up unread. So only a few streams wake in each turn of the loop. Later tokens of a waiting stream
join those in its inbox and go out in one message: a busy router sends fewer, larger messages, an idle one sends every
token at once.

Output with log-probabilities costs some ten microseconds a token to encode, and text has to be made of every token. So
the streams do a bounded amount of work in a turn, and take a long arrival in parts.

Output that a client does not read waits here too. It is bounded in bytes, for each request and for all: a request with
more is too slow, its inbox takes nothing more, and its sequences end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import (
    MAX_ALL_OUTPUT_BYTES,
    MAX_OUTPUT_BYTES,
    MAX_WHOLE_OUTPUT_BYTES,
    OUTPUT_STALL_SECONDS,
    SMALL_OUTPUT_BYTES,
)
from common.contracts.types import TokenLogprobs
from router.observe.diagnosis.ends import READS_TOO_SLOWLY
from router.workers.worker_events import PromptScored, SequenceEvent, TokensSampled

# A wake-up is about 30 us of work, most of it one gRPC write. New requests need about ten turns, so many wake-ups a
# turn delay them: at 12,000 tokens a second the first token took 8 ms with 4, 10 with 8, 26 with 16, 127 with all
# (before first tokens overtook). Between 1 and 4 no difference was measured.
WAKES_A_TURN: Final = 4
# Work of all streams in a turn of the loop, in tokens and log-probabilities: 2 to 4 ms (measured).
WORK_A_TURN: Final = 1024
# Tokens of one part of an arrival, without and with log-probabilities.
_PART_TOKENS: Final = 256
_PART_ENTRIES: Final = 32
# Bytes of a token, of its log-probabilities, and of each likely token beside it, as CPython holds them (measured).
_TOKEN_BYTES: Final = 40
_ENTRY_BYTES: Final = 200
_LIKELY_BYTES: Final = 130
# Seconds after which a client that read too slowly may ask again.
_RETRY_S: Final = 1.0


class Turns:
    """Shares the turns of one event loop among the streams of a process. Streams without output so far go first."""

    def __init__(self, wakes_a_turn: int = WAKES_A_TURN) -> None:
        # Bytes of output that wait in all inboxes, and of what their streams took last.
        self.output_bytes = 0
        self._wakes = self._left = wakes_a_turn
        self._first: deque[asyncio.Future[None]] = deque()
        self._line: deque[asyncio.Future[None]] = deque()
        # What was done in this turn, and who goes on in a later one.
        self._work = 0
        self._paced: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def now(self) -> bool:
        """Return whether the caller may go on in this turn; it then counts as woken."""
        if not self._left:
            return False
        self._left -= 1
        self._schedule()
        return True

    def wake(self, waiter: asyncio.Future[None], first: bool) -> None:
        """Set `waiter`, in this turn or in a later one; `first` says that its stream had no output yet."""
        if waiter.done():
            return  # its request was cancelled and has not run since
        if self.now():
            waiter.set_result(None)
        else:
            (self._first if first else self._line).append(waiter)

    async def pace(self, work: int) -> None:
        """Count work that a stream has done; wait for a later turn where all have done much in this one."""
        self._work += work
        self._schedule()
        if self._work >= WORK_A_TURN:
            waiter = asyncio.get_running_loop().create_future()
            self._paced.append(waiter)
            await waiter

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._left, self._scheduled, self._work = self._wakes, False, 0
        self._left -= _wake_one(self._paced)
        while self._left and (line := self._first or self._line):
            self._left -= _wake_one(line)
        if self._left < self._wakes:
            self._schedule()


def _wake_one(line: deque[asyncio.Future[None]]) -> bool:
    """Wake the first of a line whose request was not cancelled; return whether there was one."""
    while line:
        waiter = line.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return True
    return False


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline has passed."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """The caller's key is no longer known."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """A call asked for the end of the request."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The router ends, and has waited for the request as long as it may."""


Interruption = Expired | Revoked | Aborted | Stopped


@dataclass(slots=True)
class Arrival:
    """An event of one run of one sequence, or all its tokens since its last event of another kind.

    An arrival of an earlier run is out of date.
    """

    index: int
    attempt: int
    other: SequenceEvent | Interruption | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Those of the prompt; its last ones come before the first token.
    prompt: list[TokenLogprobs] = field(default_factory=list)

    def parts(self) -> Iterator[SequenceEvent | Interruption]:
        """Yield what came: one event, or several where it is too much for a turn of the loop."""
        if self.other is not None:
            yield self.other
            return
        for start in range(0, len(self.prompt), _PART_ENTRIES):
            yield PromptScored(tuple(self.prompt[start : start + _PART_ENTRIES]))
        size = _PART_ENTRIES if self.logprobs else _PART_TOKENS
        for start in range(0, len(self.token_ids), size) or (() if self.prompt else (0,)):
            part = slice(start, start + size)
            yield TokensSampled(tuple(self.token_ids[part]), tuple(self.logprobs[part]))


def work_of(event: SequenceEvent | Interruption) -> int:
    """Return what an event costs the streams, in tokens and log-probabilities."""
    if not isinstance(event, TokensSampled | PromptScored):
        return 1
    tokens = len(event.token_ids) if isinstance(event, TokensSampled) else 0
    return tokens + sum(1 + len(entry.top) for entry in event.logprobs)


def _size(event: TokensSampled | PromptScored) -> int:
    tokens = len(event.token_ids) if isinstance(event, TokensSampled) else 0
    likely = sum(len(entry.top) for entry in event.logprobs)
    return _TOKEN_BYTES * tokens + _ENTRY_BYTES * len(event.logprobs) + _LIKELY_BYTES * likely


class Inbox:
    """Events of one request that its stream has not taken yet, in order for each sequence."""

    def __init__(
        self, turns: Turns, patient: bool = False, too_slow: Callable[[], None] | None = None, whole: bool = False
    ) -> None:
        """A `patient` stream does not wake for later tokens of a sequence; it gets them with its next other event.

        `too_slow` is called when the client has left too much output unread. Of a `whole` answer nothing waits for the
        client; what waits was not encoded yet.
        """
        self._most = MAX_WHOLE_OUTPUT_BYTES if whole else MAX_OUTPUT_BYTES
        self._turns, self._patient, self._too_slow = turns, patient, too_slow or _nothing
        # Sequences that have had a token.
        self._begun: set[int] = set()
        self._arrivals: list[Arrival] = []
        # By sequence, the last arrival if it holds tokens: later tokens join it.
        self._open: dict[int, Arrival] = {}
        self._waiter: asyncio.Future[None] | None = None
        # Whether the stream has had tokens; a stream without tokens goes first, also after its admission.
        self._shown = False
        # Bytes that wait, and bytes that the stream took last and may still be sending.
        self._waiting = self._taken = 0
        # Bytes that waited when they became too many.
        self._left_unread = 0
        # Whether the stream is ready for more: what waits then waits for a turn, not for the client.
        self._ready = True
        self._reader: asyncio.Task[object] | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._closed = False
        self.interrupted = asyncio.Event()
        """Set when something other than a worker ends the request: `take_arrivals` then returns it, or raises."""

    def put_event(self, index: int, attempt: int, event: SequenceEvent | Interruption) -> None:
        """Add an event, and wake the stream. A request whose client was too slow gets nothing more."""
        if self._closed:
            return
        if isinstance(event, TokensSampled | PromptScored):
            size = _size(event)
            self._waiting += size
            self._turns.output_bytes += size
            self._join(index, attempt, event)
            if self._is_too_much():
                self._give_up()
                return
            first = isinstance(event, TokensSampled) and index not in self._begun
            if self._patient and not first and self._waiting < MAX_OUTPUT_BYTES // 2:
                return
            if first:
                self._begun.add(index)
        else:
            self._open.pop(index, None)
            self._arrivals.append(Arrival(index, attempt, event))
            if isinstance(event, Interruption):
                self.interrupted.set()
        if self._waiter is not None:
            self._turns.wake(self._waiter, first=not self._shown)
            self._waiter = None

    async def take_arrivals(self) -> list[Arrival]:
        """Return all arrivals, once there are any and the stream has its turn.

        Raises Overloaded when the client left too much output unread; then its sequences have ended.
        """
        if self._left_unread:
            raise _too_slow(self._left_unread, self._most)
        self.sent()
        if not self._arrivals or not self._turns.now():
            waiter = asyncio.get_running_loop().create_future()
            if self._arrivals:
                self._turns.wake(waiter, first=not self._shown)
            else:
                self._waiter = waiter
            try:
                await waiter
            finally:
                self._waiter = None
        arrivals, self._arrivals = self._arrivals, []
        self._shown = self._shown or bool(self._open)
        self._open.clear()
        self._taken, self._waiting = self._waiting, 0
        self._ready, self._reader = False, asyncio.current_task()
        return arrivals

    def sent(self) -> None:
        """Note that the client has received what the stream took last."""
        self._turns.output_bytes -= self._taken
        self._taken, self._ready = 0, True

    def close(self) -> None:
        """Take nothing more: the request has ended. Its run, which `too_slow` refers to, is free.

        So is its reader: a cancelled task has an error, whose frames have this inbox.
        """
        self._closed, self._too_slow, self._reader = True, _nothing, None
        self._arrivals.clear()
        self._open.clear()
        self._turns.output_bytes -= self._waiting + self._taken
        self._waiting = self._taken = 0
        if self._stalled is not None:
            self._stalled.cancel()

    def _join(self, index: int, attempt: int, event: TokensSampled | PromptScored) -> None:
        arrival = self._open.get(index)
        if arrival is None or arrival.attempt != attempt:
            arrival = self._open[index] = Arrival(index, attempt, None)
            self._arrivals.append(arrival)
        if isinstance(event, PromptScored):
            arrival.prompt += event.logprobs
            return
        arrival.token_ids += event.token_ids
        arrival.logprobs += event.logprobs

    # ------------------------------------------------------------ slow readers

    def _is_too_much(self) -> bool:
        if self._ready or self._waiting <= SMALL_OUTPUT_BYTES:
            return False
        return self._waiting > self._most or self._turns.output_bytes > MAX_ALL_OUTPUT_BYTES

    def _give_up(self) -> None:
        """Drop what waits, and end the sequences; a stream that stays blocked for long is cancelled."""
        self._left_unread = self._waiting
        too_slow, reader = self._too_slow, self._reader
        self.interrupted.set()
        self.close()
        if reader is not None:
            self._stalled = asyncio.get_running_loop().call_later(OUTPUT_STALL_SECONDS, reader.cancel)
        too_slow()


def _nothing() -> None:
    """End no sequence: the request has ended."""


def _too_slow(waited: int, most: int) -> Overloaded:
    who = READS_TOO_SLOWLY if most == MAX_OUTPUT_BYTES else "the router encodes the answer too slowly"
    what = f"{who}: {waited} bytes of its output waited, and at most {most} may"
    return Overloaded(QuotaViolation("router.output", what), _RETRY_S)
