"""Checks constraints before a request is queued: compiles them and computes their first mask.

A hostile constraint can use up processor time, memory or the stack. A child process (`examiner.py`) therefore does the
work, in a process of its own for each constraint, so that a crash costs one verdict. Sizes are bounded. Verdicts are
cached, because clients send the same schema many times.

Senders take turns, and one sender has at most one constraint under examination. A constraint that no request waits for
any more is not examined further.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import signal
import subprocess
from collections import OrderedDict, deque
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation, Unavailable, Unsupported
from common.contracts.limits import (
    COSTLY_CONSTRAINT_SECONDS,
    MAX_CONSTRAINT_BYTES,
    MAX_CONSTRAINTS,
    MAX_CONSTRAINTS_A_PEER,
    MAX_CONSTRAINTS_AT_ONCE,
    MAX_COSTLY_VERDICTS,
)
from common.contracts.types import Constraint
from common.process.python import module_command

ItemT = TypeVar("ItemT")


# A queue that takes turns: who has put many things into it does not delay who has put one.
class PeerQueue(Generic[ItemT]):
    """Items by peer: in the order of arrival for one peer, one of each peer in turn."""

    def __init__(self) -> None:
        # The first peer is the next one in turn; peers without items are not here.
        self._waiting: OrderedDict[str, deque[ItemT]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, peer: str) -> int:
        """Return the number of a peer's items."""
        return len(self._waiting.get(peer, ()))

    def put(self, peer: str, item: ItemT) -> None:
        self._waiting.setdefault(peer, deque()).append(item)

    def take(self, busy: Container[str] = ()) -> ItemT | None:
        """Return the next item, of a peer that is not `busy`; None when there is none."""
        peer = next((each for each in self._waiting if each not in busy), None)
        if peer is None:
            return None
        item = self._waiting[peer].popleft()
        self._waiting.move_to_end(peer)
        self._drop_if_empty(peer)
        return item

    def remove(self, peer: str, item: ItemT) -> None:
        """Take back an item; nothing happens when it is not here."""
        if peer in self._waiting and item in self._waiting[peer]:
            self._waiting[peer].remove(item)
            self._drop_if_empty(peer)

    def _drop_if_empty(self, peer: str) -> None:
        if not self._waiting[peer]:
            del self._waiting[peer]


log = logging.getLogger(__name__)

_MAX_VERDICTS = 512
_RETRY_S = 1.0
# A line of the child: a number and two sentences, of a few hundred characters each.
_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why no constraint can be enforced here, and why this one is wrong; both empty for a valid one.

    `seconds` is the processor time that it took to find out.
    """

    unsupported: str
    wrong: str
    seconds: float = 0.0

    @property
    def is_costly(self) -> bool:
        return not self.wrong and self.seconds > COSTLY_CONSTRAINT_SECONDS


class _Verdicts:
    """The verdicts that were asked for last, by the digest of the constraint."""

    def __init__(self) -> None:
        self._cheap: OrderedDict[bytes, Verdict] = OrderedDict()
        self._costly: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, digest: bytes) -> Verdict | None:
        kept = self._costly if digest in self._costly else self._cheap
        if digest not in kept:
            return None
        kept.move_to_end(digest)
        return kept[digest]

    def add(self, digest: bytes, verdict: Verdict) -> None:
        kept, most = (self._costly, MAX_COSTLY_VERDICTS) if verdict.is_costly else (self._cheap, _MAX_VERDICTS)
        kept[digest] = verdict
        if len(kept) > most:
            kept.popitem(last=False)


@dataclass(eq=False, slots=True)
class _Examination:
    """A constraint that waits for its verdict, and how many requests wait with it."""

    number: int
    digest: bytes
    constraint: Constraint
    peer: str
    verdict: asyncio.Future[Verdict] = field(init=False)
    requests: int = 0

    def __post_init__(self) -> None:
        self.verdict = asyncio.get_running_loop().create_future()


class ConstraintChecker:
    """Checks whether constraints can be enforced with a checkpoint's tokenizer.json; for one event loop."""

    def __init__(self, tokenizer_json: Path, eos_token_ids: tuple[int, ...] = ()) -> None:
        """The child process starts, and reads the tokenizer, at the first constraint."""
        arguments = (str(tokenizer_json.resolve()), *map(str, eos_token_ids))
        self._command = module_command("router.answers.constraints.examiner", *arguments)
        self._child: subprocess.Popen[bytes] | None = None
        self._to_child: asyncio.WriteTransport | None = None
        self._serving: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._verdicts = _Verdicts()
        # Every examination without a verdict, by the digest of its constraint; those that run, by number.
        self._open: dict[bytes, _Examination] = {}
        self._running: dict[int, _Examination] = {}
        self._waiting: PeerQueue[_Examination] = PeerQueue()

    @classmethod
    def load(cls, directory: Path, eos_token_ids: tuple[int, ...]) -> ConstraintChecker | None:
        """Return the checker of a checkpoint; None where it has no tokenizer."""
        path = tokenizer_json(directory)
        return None if path is None else cls(path, eos_token_ids)

    def __len__(self) -> int:
        """Return the number of constraints that wait or are examined."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return None if self._child is None else self._child.pid

    async def check_constraint(self, constraint: Constraint, peer: str = "") -> None:
        """Raise InvalidRequest for a wrong constraint, Unsupported if none can be enforced here, or Overloaded.

        `peer` is the tenant or the address that sent it.
        """
        verdict = _size(constraint) or await self._verdict(constraint, peer)
        if verdict.unsupported:
            raise Unsupported(verdict.unsupported)
        if verdict.wrong:
            raise InvalidRequest(FieldViolation(constraint.kind.value, verdict.wrong))

    async def aclose(self) -> None:
        """End the child; what waits for a verdict fails."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        if self._serving is not None:
            await self._serving

    # ------------------------------------------------------------ verdicts

    async def _verdict(self, constraint: Constraint, peer: str) -> Verdict:
        digest = hashlib.sha256(f"{constraint.kind.value} {constraint.text}".encode()).digest()
        if (known := self._verdicts.get(digest)) is not None:
            return known
        found = self._open.get(digest) or self._enqueue(digest, constraint, peer)
        found.requests += 1
        try:
            return await asyncio.shield(found.verdict)
        finally:
            found.requests -= 1
            if not found.requests and not found.verdict.done():
                self._withdraw(found)

    def _enqueue(self, digest: bytes, constraint: Constraint, peer: str) -> _Examination:
        for waiting, most in (
            (self._waiting.of(peer), MAX_CONSTRAINTS_A_PEER), (len(self._waiting), MAX_CONSTRAINTS)
        ):  # fmt: skip
            if waiting >= most:
                what = f"{waiting} of {most} constraints wait to be examined"
                raise Overloaded(QuotaViolation("router.constraints.checker", what), _RETRY_S)
        found = self._open[digest] = _Examination(next(self._numbers), digest, constraint, peer)
        self._waiting.put(peer, found)
        self._serve()
        return found

    def _withdraw(self, gone: _Examination) -> None:
        """End an examination that no request waits for."""
        del self._open[gone.digest]
        self._waiting.remove(gone.peer, gone)
        if self._running.pop(gone.number, None) is not None:
            self._tell([gone.number])
        self._serve()

    def _settle(self, number: int, verdict: Verdict) -> None:
        """Keep a verdict; that of a withdrawn examination is dropped."""
        if (found := self._running.pop(number, None)) is None:
            return
        del self._open[found.digest]
        found.verdict.set_result(verdict)
        self._verdicts.add(found.digest, verdict)

    # ------------------------------------------------------------ the child process

    def _serve(self) -> None:
        """See that the child runs, and that it has as much to do as it may."""
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._run_child())
        elif self._to_child is not None:
            self._send_more()

    def _send_more(self) -> None:
        while len(self._running) < MAX_CONSTRAINTS_AT_ONCE:
            following = self._waiting.take(busy={each.peer for each in self._running.values()})
            if following is None:
                return
            self._running[following.number] = following
            self._tell([following.number, following.constraint.kind.value, following.constraint.text])

    def _tell(self, line: list[object]) -> None:
        if self._to_child is not None and not self._to_child.is_closing():
            self._to_child.write(json.dumps(line).encode() + b"\n")

    async def _run_child(self) -> None:
        """Serve what waits with a child, until the child ends; then all that waits fails."""
        status = -1
        try:
            status = await self._converse()
        except OSError as error:
            log.error("constraints cannot be examined: no process could be started: %s", error)
        finally:
            self._child = self._to_child = None
            self._fail(status)

    async def _converse(self) -> int:
        """Start a child, and take its verdicts until it ends; return its status."""
        # Not by asyncio: the fork of uvloop runs the handlers that gRPC has for forks; the vfork of Popen does not.
        child = await asyncio.to_thread(_start, self._command)
        self._child = child
        assert child.stdin is not None
        assert child.stdout is not None
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(_LINE_BYTES)
        self._to_child, _ = await loop.connect_write_pipe(asyncio.Protocol, child.stdin)
        from_child, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), child.stdout)
        self._send_more()
        async for line in lines:
            number, *words = json.loads(line)
            self._settle(number, Verdict(*words))
            self._send_more()
        from_child.close()
        self._to_child.close()
        return await asyncio.to_thread(child.wait)

    def _fail(self, status: int) -> None:
        """Fail all examinations; the next one starts another child."""
        failed, self._open, self._running, self._waiting = list(self._open.values()), {}, {}, PeerQueue()
        for each in failed:
            if status > 0:
                what = f"constraints cannot be examined here: llguidance failed with status {status}"
                each.verdict.set_exception(Unsupported(what))
            else:
                each.verdict.set_exception(Unavailable("the process that examines constraints ended", _RETRY_S))


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # Discarded: the error output of llguidance may quote the constraint.
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)


def _size(constraint: Constraint) -> Verdict | None:
    size = len(constraint.text.encode())
    if size <= MAX_CONSTRAINT_BYTES:
        return None
    return Verdict("", f"has {size} bytes; expected at most {MAX_CONSTRAINT_BYTES}")
