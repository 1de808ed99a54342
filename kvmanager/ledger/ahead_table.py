"""Prefixes that are to be in a worker's host memory before a sequence asks for them, and what is under way for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from common.contracts.transfers import Transfer, TransferEnd
from common.contracts.types import BlockHash


class AheadKind(StrEnum):
    """Who wants a prefix ahead of need: a caller, or the rule that copies hot prefixes."""

    PREFETCH = "prefetch"
    REPLICA = "replica"


class Outcome(StrEnum):
    """What became of the wish for a prefix: all of it is to come, a part of it, or nothing."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REFUSED = "refused"


class Answer(NamedTuple):
    """`blocks` of a prefix are to come behind the `there` ones that are there. `why` says what keeps out the others."""

    outcome: Outcome
    there: int
    blocks: int
    why: str = ""


@dataclass(slots=True)
class Wish:
    """A prefix that is to come, up to its last block; `there` of them were there when it was asked for.

    Where the pool has groups, it may fill so many `pages`, and so many contents are still to be ordered, `left`.
    """

    kind: AheadKind
    hashes: tuple[BlockHash, ...]
    there: int
    why: str
    asked: float
    came: int = 0
    pages: int = 0
    left: int = 0


@dataclass(slots=True)
class Part:
    """Blocks of the first wish that were ordered at once; the transfers of `open` have not ended.

    Others have brought what has the keys `came`.
    """

    open: set[int]
    began: float
    failed: int = 0
    came: list[BlockHash] = field(default_factory=list)


class AheadTable:
    """Wishes of one worker, the first one under way. No part is ordered before the clock reads `due`.

    `came` has the keys of what came by them in this session and has not left host memory since.
    """

    __slots__ = ("came", "due", "part", "wishes")

    def __init__(self) -> None:
        self.wishes: deque[Wish] = deque()
        self.part: Part | None = None
        self.due = 0.0
        self.came: dict[BlockHash, AheadKind] = {}

    @property
    def open(self) -> int:
        """The transfers that have not ended."""
        return len(self.part.open) if self.part is not None else 0

    @property
    def frames(self) -> int:
        """The frames that all wishes may still fill."""
        return sum(each.pages or len(each.hashes) - each.there - each.came for each in self.wishes)

    def find_wish(self, hashes: Items[BlockHash]) -> Wish | None:
        """Return a wish that goes as far as a prefix, or further."""
        return next((each for each in self.wishes if each.hashes[: len(hashes)] == tuple(hashes)), None)

    def note_end(self, transfer: Transfer, end: TransferEnd) -> None:
        """Count a transfer that has ended, if it is one of the part under way."""
        part = self.part
        if part is None or transfer.id not in part.open:
            return
        part.open.discard(transfer.id)
        if end is TransferEnd.DONE:
            part.came.append(transfer.key)
        else:
            part.failed += 1

    def note_came(self, part: Part, kind: AheadKind, there: Container[BlockHash]) -> None:
        """Remember what a part has brought, as far as it is `there`, in host memory: the record of a grant says so."""
        self.came.update([(key, kind) for key in part.came if key in there])

    def forget_absent(self, there: Container[BlockHash]) -> None:
        """Forget what came and is not `there`, in host memory, any more."""
        self.came = {key: kind for key, kind in self.came.items() if key in there}

    def clear_wishes(self) -> None:
        """Forget what is to come. Transfers of a part that are open are then like those of a sequence that has left."""
        self.wishes.clear()
        self.part = None

    def clear(self) -> None:
        """Forget everything: the cache was reset."""
        self.clear_wishes()
        self.came.clear()

    def copy(self) -> AheadTable:
        twin = AheadTable()
        twin.due, twin.came = self.due, self.came.copy()
        twin.wishes.extend(map(replace, self.wishes))
        if self.part is not None:
            twin.part = replace(self.part, open=self.part.open.copy(), came=self.part.came.copy())
        return twin

    def key(self, now: float) -> tuple[object, ...]:
        """Return what is to come, hashable; the clock counts from now on."""
        part = self.part and (frozenset(self.part.open), now - self.part.began, self.part.failed)
        return (
            tuple((e.kind, e.hashes, e.there, e.came, e.pages, e.left) for e in self.wishes),
            part,
            max(0.0, self.due - now),
        )
