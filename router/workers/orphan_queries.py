"""Questions to one worker about orphans, and its answers."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from common.contracts.errors import QuireError
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.workers.orphan_codec import orphan_from_proto
from router.workers.resuming import Orphan


@dataclass(frozen=True, slots=True)
class FoundOrphans:
    """A worker's orphans of one request. `submit` is that of the first; `held`: another stream has some of it too."""

    orphans: tuple[Orphan, ...] = ()
    submit: pb.Submit | None = None
    held: bool = False


class OrphanQueries:
    """The questions that a worker has not answered yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[FoundOrphans]] = {}

    def ask(self, request_id: str, tenant: str) -> tuple[pb.Find, asyncio.Future[FoundOrphans]]:
        """Return a question, and the future of its answer, which fails when the stream breaks."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answer
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        return pb.Find(query=number, request_id=request_id, tenant=tenant), answer

    def answered(self, found: pb.Found) -> None:
        answer = self._open.get(found.query)
        if answer is None or answer.done():
            return
        first = found.orphans[0].submit if found.orphans else None
        orphans = tuple([orphan_from_proto(each, first) for each in found.orphans]) if first is not None else ()
        answer.set_result(FoundOrphans(orphans, first, found.held))

    def lose(self, error: QuireError) -> None:
        """Fail all: the stream has broken."""
        for answer in list(self._open.values()):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # whoever asked may have left
