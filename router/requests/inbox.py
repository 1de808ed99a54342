"""The inbox of a request's events, and the order in which streams wake up to send them.

A step of a worker brings a token for every stream at once. If all streams woke at once, the event loop would write for
10 ms (400 streams) before it reads its sockets again: new requests would wait, and steps that come faster than they can
be written would pile up unread. So only a few streams wake in each turn of the loop. Later tokens of a waiting stream
join those in its inbox and go out in one message: a busy router sends fewer, larger messages, an idle one sends every
token at once. This also bounds the memory for a client that reads slowly: eight bytes a token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from common.types import TokenLogprobs
from router.core.worker_events import SequenceEvent, TokensSampled

# A wake-up is about 30 us of work, most of it one gRPC write. New requests need about ten turns, so many wake-ups a
# turn delay them: at 12,000 tokens a second the first token took 8 ms with 4, 10 with 8, 26 with 16, 127 with all
# (before first tokens overtook). Between 1 and 4 no difference was measured.
WAKES_A_TURN: Final = 4


class Turns:
    """Shares the turns of one event loop among the streams of a process. Streams without output so far go first."""

    def __init__(self, wakes_a_turn: int = WAKES_A_TURN) -> None:
        self._wakes = self._left = wakes_a_turn
        self._first: deque[asyncio.Future[None]] = deque()
        self._line: deque[asyncio.Future[None]] = deque()
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

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._left, self._scheduled = self._wakes, False
        while self._left and (line := self._first or self._line):
            waiter = line.popleft()
            if not waiter.done():  # its request may have been cancelled
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._wakes:
            self._schedule()


@dataclass(frozen=True, slots=True)
class Expired: ...


@dataclass(slots=True)
class Arrival:
    """An event of one run of one sequence, or all its tokens since its last event of another kind.

    An arrival of an earlier run is out of date.
    """

    index: int
    attempt: int
    other: SequenceEvent | Expired | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def event(self) -> SequenceEvent | Expired:
        """What came, as one event."""
        return TokensSampled(tuple(self.token_ids), tuple(self.logprobs)) if self.other is None else self.other


class Inbox:
    """Events of one request that its stream has not taken yet, in order for each sequence."""

    __slots__ = ("_arrivals", "_begun", "_open", "_patient", "_shown", "_turns", "_waiter")

    def __init__(self, turns: Turns, patient: bool = False) -> None:
        """A `patient` stream does not wake for later tokens of a sequence; it gets them with its next other event."""
        self._turns, self._patient = turns, patient
        # Sequences that have had a token.
        self._begun: set[int] = set()
        self._arrivals: list[Arrival] = []
        # By sequence, the last arrival if it holds tokens: later tokens join it.
        self._open: dict[int, Arrival] = {}
        self._waiter: asyncio.Future[None] | None = None
        # Whether the stream has had tokens; a stream without tokens goes first, also after its admission.
        self._shown = False

    def put(self, index: int, attempt: int, event: SequenceEvent | Expired) -> None:
        """Add an event, and wake the stream."""
        if isinstance(event, TokensSampled):
            self._join(index, attempt, event)
            if self._patient and index in self._begun:
                return
            self._begun.add(index)
        else:
            self._open.pop(index, None)
            self._arrivals.append(Arrival(index, attempt, event))
        if self._waiter is not None:
            self._turns.wake(self._waiter, first=not self._shown)
            self._waiter = None

    async def take(self) -> list[Arrival]:
        """Return all arrivals, once there are any and the stream has its turn."""
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
        return arrivals

    def _join(self, index: int, attempt: int, sampled: TokensSampled) -> None:
        arrival = self._open.get(index)
        if arrival is None or arrival.attempt != attempt:
            arrival = self._open[index] = Arrival(index, attempt, None)
            self._arrivals.append(arrival)
        arrival.token_ids += sampled.token_ids
        arrival.logprobs += sampled.logprobs
