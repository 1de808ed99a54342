"""The bounded ring of decision records that each service keeps: why a request went somewhere, waited or lost blocks.

Standard library only. A record is found by every request that it concerns: its subject, the victim and the beneficiary.
So "who preempted mine?" and "whom did mine preempt?" are one query.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from common.contracts.limits import MAX_LISTED_BYTES, MAX_LISTED_DECISIONS, MAX_WATCHED_BYTES, MAX_WATCHED_DECISIONS
from common.contracts.types import Decision
from common.decisions.log_line import log_decision
from common.decisions.query import DecisionQuery, concerned

DEFAULT_LIMIT = 100
DEFAULT_RING_BYTES: Final = 64 << 20

# Records that a watcher looks at in one turn of the loop.
_LOOKED_AT: Final = 4_096
# Bytes in CPython: a record with its places in ring and indexes; a candidate; a name with a number.
_RECORD_BYTES: Final = 1_400
_CANDIDATE_BYTES: Final = 200
_PAIR_BYTES: Final = 110


Numbered = tuple[int, Decision]
"""A record with its number."""
_Entry = tuple[int, Decision, int]
"""A record with its number, and about how much memory it takes."""


@dataclass(frozen=True, slots=True)
class Page:
    """Records, oldest first; `more` says whether an earlier one matches too."""

    records: tuple[Numbered, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Passed:
    """The next records of a watch. `number` is the last that was looked at; `lost` ones before them are gone."""

    records: tuple[Numbered, ...]
    number: int
    lost: int


class DecisionRing:
    """The newest records, oldest first: at most `capacity`, and at most about `max_bytes` of memory.

    `source` names the process ("": at random), which numbers its records from 1; `began_ns` is when it began.
    """

    def __init__(self, capacity: int, max_bytes: int = DEFAULT_RING_BYTES, source: str = "", began_ns: int = 0) -> None:
        if capacity < 1 or max_bytes < 1:
            raise ValueError(f"capacity is {capacity} and max_bytes is {max_bytes}; expected 1 or more")
        self._capacity, self._max_bytes, self.source = capacity, max_bytes, source or secrets.token_hex(8)
        self._records: deque[_Entry] = deque()
        self._by_request: dict[str, deque[_Entry]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._copy: Callable[[int, Decision, int], None] | None = None
        self.bytes = 0
        # How many records were made; the newest has this number.
        self.made = 0
        # Every record made since this time is kept.
        self.complete_since_ns = began_ns

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Decision]:
        return (decision for _, decision, _ in self._records)

    def record(self, decision: Decision, quiet: bool = False) -> None:
        """Keep a record, and log it (a `quiet` one has a better line); the oldest ones go when the ring is full."""
        log_decision(decision, quiet)
        size = record_bytes(decision)
        while self._records and (len(self._records) == self._capacity or self.bytes + size > self._max_bytes):
            self._forget_oldest()
        self.made += 1
        entry = (self.made, decision, size)
        self._records.append(entry)
        self.bytes += size
        for request_id in concerned(decision):
            records = self._by_request.get(request_id)
            if records is None:
                self._by_request[request_id] = deque((entry,))
            else:
                records.append(entry)
        if self._copy is not None:
            self._copy(*entry)
        for told in self._listeners:
            told()

    def copy_to(self, copy: Callable[[int, Decision, int], None]) -> None:
        """Call `copy` with each record from now on, its number, and about how much memory it takes."""
        self._copy = copy

    def find(self, request_id: str = "", kind: str = "", limit: int = 0, tenant: str = "") -> list[Decision]:
        """Return the newest `limit` records (0: a hundred) that match all filters, oldest first; "" matches all."""
        found = self.page(DecisionQuery(request_id, kind, tenant), limit)
        return [decision for _, decision in found.records]

    def page(self, query: DecisionQuery, limit: int = 0, before: int | None = None) -> Page:
        """Return the newest `limit` records that match, oldest first; only those with a number below `before`.

        A page has about MAX_LISTED_BYTES at most, and one record at least.
        """
        found: list[Numbered] = []
        most, room = listed(limit), MAX_LISTED_BYTES
        kind, matches = query.kind, query.matches
        for number, decision, size in self._backwards(query.request_id, before):
            # The kind alone first: a call for each of 50,000 records takes several milliseconds.
            if (kind and decision.kind != kind) or not matches(decision):
                continue
            room -= size
            if found and (room < 0 or len(found) == most):
                return Page(tuple(reversed(found)), more=True)
            found.append((number, decision))
        return Page(tuple(reversed(found)), more=False)

    def after(self, number: int, query: DecisionQuery) -> Passed:
        """Return the next few records after the one of a number that match, and up to where they were looked for."""
        oldest = self.made - len(self._records) + 1
        first = max(number + 1, oldest)
        found: list[Numbered] = []
        room, last = MAX_WATCHED_BYTES, min(self.made, first + _LOOKED_AT - 1)
        for each in range(first, last + 1):
            _, decision, size = self._records[each - oldest]
            if query.matches(decision):
                found.append((each, decision))
                room -= size
            if room < 0 or len(found) == MAX_WATCHED_DECISIONS:
                last = each
                break
        return Passed(tuple(found), max(last, first - 1), lost=first - number - 1)

    def listen(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each record, until the returned function is called."""
        self._listeners.append(told)
        return lambda: self._listeners.remove(told)

    def _backwards(self, request_id: str, before: int | None) -> Iterator[_Entry]:
        """Return the entries below a number, newest first."""
        end = self.made + 1 if before is None else before
        if request_id:
            return (each for each in reversed(self._by_request.get(request_id, ())) if each[0] < end)
        return itertools.islice(reversed(self._records), max(0, self.made + 1 - end), None)

    def _forget_oldest(self) -> None:
        _, decision, size = self._records.popleft()
        self.bytes -= size
        self.complete_since_ns = max(self.complete_since_ns, decision.time_ns + 1)
        for request_id in concerned(decision):
            records = self._by_request[request_id]
            # Records leave this index in the order in which they came, as in the ring.
            records.popleft()
            if not records:
                del self._by_request[request_id]


def listed(limit: int) -> int:
    """Return how many records one answer has when `limit` are asked for."""
    return min(limit or DEFAULT_LIMIT, MAX_LISTED_DECISIONS)


def record_bytes(decision: Decision) -> int:
    """Return about how much memory a record takes."""
    pairs = len(decision.signal_ages) + len(decision.figures)
    names = (decision.decision_id, decision.request_id, decision.tenant, decision.victim, decision.beneficiary)
    texts = sum(map(len, (*names, decision.chosen, decision.traceparent, *decision.reasons)))
    # One loop without calls: an eviction has eight candidates.
    for each in decision.candidates:
        pairs += len(each.terms) + len(each.figures)
        texts += len(each.name) + len(each.rejected)
    return _RECORD_BYTES + len(decision.candidates) * _CANDIDATE_BYTES + pairs * _PAIR_BYTES + texts
