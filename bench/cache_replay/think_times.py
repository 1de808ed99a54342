"""Think times of sessions, learned while requests come, and what retaining a session's blocks for that long would give.

A session's think time is the time from the end of an answer to its next request. It is learned by session and by
tenant, in bounded tables. A session that has come back once retains its blocks until most of those who come back have.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bench.cache_replay.workloads import CacheRequest
from common.contracts.lease import LAST_BLOCK, RetainedBlocks

# Upper bounds of the buckets of a tenant's think times: 0.25 s, and on by factors of the square root of 2 to 48 min.
_FIRST, _FACTOR, _BUCKETS = 0.25, math.sqrt(2.0), 28
# A tenant's counts are halved beyond so many, so that later ones weigh more.
_MOST_COUNTED: Final = 512
# Think times of a tenant before any is predicted, and of a session before its own count; those of it that are kept.
_LEAST_OF_TENANT, _LEAST_OF_SESSION, _KEPT = 8, 4, 8
_QUANTILE: Final = 0.9
_PRIORITY: Final = 60


@dataclass(slots=True)
class _Session:
    ended: float
    gaps: list[float] = field(default_factory=list)


class ThinkTimes:
    """Predicts after how many seconds a session will have come back. The sessions and tenants of late are known."""

    def __init__(self, most_sessions: int = 4096, most_tenants: int = 256) -> None:
        self._most_sessions, self._most_tenants = most_sessions, most_tenants
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._tenants: OrderedDict[str, list[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions) + len(self._tenants)

    def note_request(self, tenant: str, session: str, now: float) -> None:
        """Note that a request comes. One that comes while another runs tells nothing."""
        known = self._sessions.get((tenant, session))
        if known is None or now < known.ended:
            return
        gap = now - known.ended
        known.gaps = [*known.gaps[1 - _KEPT :], gap]
        counts = self._tenants.setdefault(tenant, [0.0] * _BUCKETS)
        self._tenants.move_to_end(tenant)
        counts[_bucket_of(gap)] += 1.0
        if sum(counts) > _MOST_COUNTED:
            counts[:] = [each / 2 for each in counts]
        if len(self._tenants) > self._most_tenants:
            self._tenants.popitem(last=False)

    def note_end(self, tenant: str, session: str, now: float) -> None:
        """Note that an answer ends."""
        known = self._sessions.setdefault((tenant, session), _Session(now))
        known.ended = max(known.ended, now)
        self._sessions.move_to_end((tenant, session))
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)

    def predict(self, tenant: str, session: str) -> float | None:
        """Return the seconds within which nine of ten come back; None for a session that has not come back yet."""
        known, counts = self._sessions.get((tenant, session)), self._tenants.get(tenant)
        if known is None or not known.gaps or counts is None or sum(counts) < _LEAST_OF_TENANT:
            return None
        if len(known.gaps) >= _LEAST_OF_SESSION:
            return sorted(known.gaps)[int(_QUANTILE * len(known.gaps))]
        wanted, found = _QUANTILE * sum(counts), 0.0
        for bucket, count in enumerate(counts):
            found += count
            if found >= wanted:
                return _FIRST * _FACTOR**bucket
        return _FIRST * _FACTOR ** (_BUCKETS - 1)


def _bucket_of(seconds: float) -> int:
    if seconds <= _FIRST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _FIRST) / math.log(_FACTOR) - 1e-9))


def retained(requests: Sequence[CacheRequest], blocks: int, part: float = math.inf) -> Iterator[CacheRequest]:
    """Yield the requests with the retention that their sessions would get, and no other.

    None is asked for while all sessions together would retain more than this part of a pool of so many blocks. An
    answer ends when its request comes: of these workloads, both are one moment.
    """
    learned, held, ends, total = ThinkTimes(), dict[str, tuple[float, int]](), list[tuple[float, str]](), 0
    for request in requests:
        now, session, terms = request.at, request.session, tuple[RetainedBlocks, ...]()
        while ends and ends[0][0] <= now:
            end, other = heapq.heappop(ends)
            if other in held and held[other][0] == end:
                total -= held.pop(other)[1]
        if session:
            total -= held.pop(session, (0.0, 0))[1]
            learned.note_request("", session, now)
            learned.note_end("", session, now)
            if (seconds := learned.predict("", session)) is not None:
                size = len(request.prompt) + len(request.output)
                held[session] = now + seconds, size
                heapq.heappush(ends, (now + seconds, session))
                total += size
                if total <= part * blocks:
                    terms = (RetainedBlocks(0, LAST_BLOCK, _PRIORITY, seconds),)
        yield replace(request, retention=terms)
