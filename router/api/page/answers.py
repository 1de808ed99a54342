"""Answers to questions for data: shared for a second, few at once, and few questions of one address."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar

from common.contracts.clock import Clock
from common.contracts.errors import InvalidRequest, NotFound, QuireError, Unavailable
from common.process.loop_turns import in_steps
from common.process.small_http import Reply
from router.api.page.query import Query

# All work together has a tenth of the loop.
IDLE: Final = 9
# A process that was stopped during a step need not make up for it.
MOST_PAUSE_S: Final = 1.0

ResultT = TypeVar("ResultT")


# A small share of the event loop for work that is not urgent: one step at a time, and a pause after each.
# A step is what a coroutine does between two awaits. The pause is a multiple of the time that the step took.
class _Step(NamedTuple):
    """What a coroutine waits for after a step, or its result at the end."""

    waits_for: Any
    is_last: bool = False


class LoopShare:
    def __init__(self, clock: Clock, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """`pause` waits for some seconds, and for one turn of the loop at least."""
        self._clock, self._pause = clock, pause
        self._one, self._free_at = asyncio.Lock(), 0.0

    @coroutine
    def run(self, work: Coroutine[Any, Any, ResultT]) -> Generator[Any, Any, ResultT]:
        """Return the result of a coroutine, whose steps take turns with those of others here."""
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                step = yield from self._step(resume).__await__()
                if step.is_last:
                    result: ResultT = step.waits_for
                    return result
                yield step.waits_for
            except asyncio.CancelledError as error:
                # A coroutine that has ended, by this cancellation too, cannot be resumed.
                if _has_ended(work):
                    raise
                resume = partial(work.throw, error)
            else:
                resume = partial(work.send, None)

    async def _step(self, resume: Callable[[], Any]) -> _Step:
        async with self._one:
            await self._pause(max(0.0, self._free_at - self._clock.monotonic()))
            began = self._clock.monotonic()
            try:
                return _Step(resume())
            except StopIteration as end:
                return _Step(end.value, is_last=True)
            finally:
                ended = self._clock.monotonic()
                self._free_at = ended + min(IDLE * (ended - began), MOST_PAUSE_S)


def _has_ended(work: Coroutine[Any, Any, Any]) -> bool:
    return getattr(work, "cr_frame", None) is None


# Several tabs and several people share an answer for so long.
FRESH_S: Final = 1.0
MOST_KEPT: Final = 64
# Questions that wait for an answer, of all and of one address.
MOST_WAITING: Final = 64
MOST_WAITING_A_PEER: Final = 16
AT_ONCE: Final = 4
_STATUSES: Final[tuple[tuple[type[QuireError], HTTPStatus], ...]] = (
    (InvalidRequest, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)

Key = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a source, and the parameters by name."""
Later = Callable[[float, Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class Source:
    """What answers one path, and the parameters that it takes. `check` raises InvalidRequest for wrong values."""

    answer: Callable[[Query], Awaitable[object]]
    parameters: frozenset[str] = field(default=frozenset())
    check: Callable[[Query], object] = lambda _: None


@dataclass(slots=True)
class _Question:
    """A question and how many readers wait for its answer. `peer` is the address of the first."""

    key: Key
    peer: str
    task: asyncio.Task[Reply]
    readers: int = 0


class Answers:
    """`later` calls a function after some seconds; by default the event loop does."""

    def __init__(self, sources: Mapping[str, Source], clock: Clock, later: Later | None = None) -> None:
        self._sources, self._later = sources, later
        self._waiting: dict[Key, _Question] = {}
        self._by_peer = Counter[str]()
        self._kept: dict[Key, Reply] = {}
        self._share, self._turns = LoopShare(clock), asyncio.Semaphore(AT_ONCE)

    @property
    def kept(self) -> int:
        """How many answers are kept for those who ask the same."""
        return len(self._kept)

    async def to(self, name: str, query: str, peer: str) -> Reply:
        """Answer with what an equal question got within the last second, or is about to get.

        A wrong question is refused at once: it takes no place.
        """
        source = self._sources.get(name)
        if source is None:
            words = f"there is no data of this name; expected {', '.join(sorted(self._sources))}"
            return error_of(NotFound(words))
        try:
            parameters = Query(query)
            parameters.allow(source.parameters)
            source.check(parameters)
        except InvalidRequest as error:
            return error_of(error)
        key = name, parameters.key()
        if (kept := self._kept.get(key)) is not None:
            return kept
        question = self._waiting.get(key)
        if question is None:
            if full := self._full(peer):
                return error_reply(HTTPStatus.TOO_MANY_REQUESTS, f"{full}; ask again in a second", "overloaded")
            question = self._begin(_Question(key, peer, asyncio.create_task(self._made(source, parameters))))
        return await self._read(question)

    def _full(self, peer: str) -> str:
        """Return why a new question gets no place, or ""."""
        if self._by_peer.total() >= MOST_WAITING:
            return f"too many questions at once: {MOST_WAITING} wait"
        if self._by_peer[peer] >= MOST_WAITING_A_PEER:
            return f"too many questions at once: {MOST_WAITING_A_PEER} of {peer} wait"
        return ""

    def _begin(self, question: _Question) -> _Question:
        self._waiting[question.key] = question
        self._by_peer[question.peer] += 1
        question.task.add_done_callback(lambda task: self._end(question, task))
        return question

    def _end(self, question: _Question, task: asyncio.Task[Reply]) -> None:
        self._drop(question)
        self._by_peer[question.peer] -= 1
        if not self._by_peer[question.peer]:
            del self._by_peer[question.peer]
        if task.cancelled() or task.exception() is not None:
            return
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        reply = self._kept[question.key] = task.result()
        later = self._later or asyncio.get_running_loop().call_later
        later(FRESH_S, lambda: self._forget(question.key, reply))

    def _drop(self, question: _Question) -> None:
        """Let nobody join a question."""
        if self._waiting.get(question.key) is question:
            del self._waiting[question.key]

    def _forget(self, key: Key, reply: Reply) -> None:
        if self._kept.get(key) is reply:
            del self._kept[key]

    async def _read(self, question: _Question) -> Reply:
        """Wait for the answer. A question without readers is dropped."""
        question.readers += 1
        try:
            return await asyncio.shield(question.task)
        finally:
            question.readers -= 1
            # It counts until it has ended, but nobody joins it any more.
            if not question.readers and question.task.cancel():
                self._drop(question)

    async def _made(self, source: Source, parameters: Query) -> Reply:
        async with self._turns:
            return await self._share.run(_answered(source, parameters))


async def _answered(source: Source, parameters: Query) -> Reply:
    try:
        return _reply(HTTPStatus.OK, await json_of(await source.answer(parameters)))
    except QuireError as error:
        return error_of(error)


async def json_of(value: Any) -> str:
    """Return an object as JSON, in steps: members that are lists take a few entries in each."""
    if not isinstance(value, dict):
        return _dumped(value)
    members = []
    for name, member in value.items():
        long = isinstance(member, list) and not _is_plain(member)
        text = f"[{','.join(await in_steps(_dumped, member))}]" if long else _dumped(member)
        members.append(f"{_dumped(name)}:{text}")
    await asyncio.sleep(0)
    return f"{{{','.join(members)}}}"


def _is_plain(values: Collection[object]) -> bool:
    """Return whether a list has numbers and texts alone, of which many are written in no time."""
    return not any(isinstance(each, dict | list) for each in values)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def error_of(error: QuireError) -> Reply:
    status = next((each for kind, each in _STATUSES if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_reply(status, str(error), error.reason.lower())


def error_reply(status: HTTPStatus, message: str, code: str) -> Reply:
    return _reply(status, _dumped({"error": {"message": message, "code": code}}))


def _reply(status: HTTPStatus, body: str) -> Reply:
    return Reply(status, "application/json", body.encode(errors="replace"))
