"""How many leading blocks of a prompt a worker need not compute, where it keeps K/V of windows or chunks.

A run of blocks counts that reaches back from its end as far as the next token sees (`run_rule.py`). With one window of
W slots these are r blocks, where r is (W - 1) / block size, rounded up: a run that counts begins with the first block,
or has r blocks at least. So each run that counts has one of the blocks 0, r, 2r, ..., the probes; chunks have others.
Probes are read first. Further blocks are read only beside those that a worker holds, the deepest first, until its
deepest run that counts is known.

At a chunk's boundary the next token sees nothing before it. The full layers of the model do, and their blocks are in no
index. A worker that has a block registered has all full blocks up to it, so that the block before is asked for.

The workers of a block are the bits of one integer. All workers are followed at once, by a few operations a block: each
block of a long prompt may have hundreds of holders, and other ones than its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Final, TypeAlias

from router.placement.prefix_holders import WINDOWS, Entry
from router.placement.run_rule import RunRule

_NOBODY: Final = ("", -1)
_MOST: Final = WINDOWS[-1]
"""Blocks that are wanted at once."""

Workers: TypeAlias = int
"""A set of workers: bit i stands for the i-th entry that counts, in the order in which the search met them."""


class RunSearch:
    """Says which blocks to read next, and counts the blocks before the end of each worker's deepest run.

    A run that ends with the last block counts only if the hits without that block would count too. For the manager
    gives no hit on the block of a prompt's last token, and a reader of hashes does not know which block that is.
    """

    def __init__(
        self,
        live: Mapping[int, tuple[str, int]],
        unpack: Callable[[bytes], Sequence[Entry]],
        rule: RunRule,
        length: int,
    ) -> None:
        """`live` gives (worker id, generation) by slot; other entries do not count.

        `rule` says which blocks a boundary needs; `length` is the number of all block hashes.
        """
        self._unpack, self._bits = unpack, _Bits(live)
        self._rule, self._length = rule, length
        # A stretch goes from a probe to the block before the next one.
        self._probes = rule.probes(length)
        if self._probes[1:] and self._probes[-1] == length - 1 and self._latest_begin(length) < self._probes[-2]:
            # A run to the end of all blocks must not begin before the stretch that is before its own.
            del self._probes[-1]
        # Workers of each block that was read.
        self._holders: dict[int, Workers] = {}
        self._last: tuple[bytes | None, Workers] = (None, 0)
        self._queue = list(self._probes)
        # The stretches that were asked for whole; by the stretch to look at, the workers whose deepest run that counts
        # is not known; and the ends of the runs that are known, by the number of the worker's bit.
        self._asked: set[int] = set()
        self._open: dict[int, Workers] = {}
        self._ends: dict[int, int] = {}
        # Whether the probes were read.
        self.probed = not self._queue

    @property
    def unknown(self) -> set[int]:
        """The slots of which an entry does not count: their owners may be newer than `live`."""
        return self._bits.unknown

    def wanted(self) -> list[int]:
        """Return the places of the blocks to read next; none when all hits are known."""
        return self._queue[:_MOST]

    def feed(self, values: Sequence[bytes | None]) -> None:
        """Take the values of the wanted blocks, or of the first ones of them."""
        for place, value in zip(self._queue[: len(values)], values, strict=True):
            # Neighbouring blocks mostly have the same holders, and so the same bytes.
            if value != self._last[0]:
                entries = self._unpack(value) if value else ()
                self._last = value, reduce(or_, map(self._bits.__getitem__, entries), 0)
            self._holders[place] = self._last[1]
        del self._queue[: len(values)]
        if self._queue:
            return
        if not self.probed:
            self.probed, self._open = True, self._deepest()
        self._ask_further()

    def hits(self) -> dict[str, int]:
        """Return the number of blocks that need not be computed by worker id; workers with none are left out.

        If the search is not at its end, the hits are those that the blocks read so far prove.
        """
        ends, hits = dict(self._ends), dict[str, int]()
        falling: Workers = 0
        open_ = self._open if self.probed else self._deepest()
        for stretch in range(max(open_, default=-1), -1, -1):
            here, falling = self._split(stretch, falling | open_.get(stretch, 0))
            falling |= self._without_run(stretch, here, ends)
        for number, end in ends.items():
            worker_id = self._bits.worker_ids[number]
            hits[worker_id] = max(end, hits.get(worker_id, 0))
        return hits

    def _deepest(self) -> dict[int, Workers]:
        """Return by stretch the workers that hold its first block, and that of no later stretch."""
        deepest, found = dict[int, Workers](), 0
        for stretch in reversed(range(len(self._probes))):
            if new := self._holders.get(self._probes[stretch], 0) & ~found:
                deepest[stretch] = new
                found |= new
        return deepest

    def _ask_further(self) -> None:
        """Find the deepest runs of all workers, as far as they were read, and want what is needed beside that."""
        open_, self._open = self._open, {}
        needed, falling = list[int](), 0
        for stretch in range(max(open_, default=-1), -1, -1):
            here, falling = self._split(stretch, falling | open_.get(stretch, 0))
            missing = self._missing(stretch) if here else []
            needed += missing
            if missing:
                self._open[stretch] = here
            else:
                falling |= self._without_run(stretch, here, self._ends)
        for stretch in dict.fromkeys(needed):
            self._queue += self._places(stretch)[1:]
        self._asked.update(needed)

    def _split(self, stretch: int, workers: Workers) -> tuple[Workers, Workers]:
        """Return the workers that hold a stretch's first block, and the others: their runs begin further back."""
        here = workers & self._holders.get(self._probes[stretch], 0)
        return here, workers ^ here

    def _missing(self, stretch: int) -> list[int]:
        """Return which stretches to read before the runs that a stretch cuts can be told, the deepest first."""
        whole = {stretch: None, max(0, stretch - 1): None}
        return [each for each in whole if each not in self._asked and len(self._places(each)) > 1]

    def _without_run(self, stretch: int, workers: Workers, ends: dict[int, int]) -> Workers:
        """Put where runs end into `ends`, of workers that hold a stretch's first block; return those without a run.

        A run that counts ends within the stretch, or the worker's next stretch was looked at before. If the run covers
        the stretch before, it is long enough. A block that was not read counts as not held.
        """
        if not workers:
            return 0
        before, failed = self._holders_before(stretch, workers), 0
        for end, ending in self._ends_within(stretch, workers):
            distance = max(0, self._probes[stretch] - self._latest_begin(end))
            counting = ending & before[distance] if distance < len(before) else 0
            ends.update(dict.fromkeys(_numbers(counting), end))
            failed |= ending ^ counting
        return failed

    def _holders_before(self, stretch: int, workers: Workers) -> list[Workers]:
        """Return which of the workers hold the last 0, 1, 2, ... blocks before a stretch, as long as any does."""
        before = [workers]
        for place in reversed(self._places(stretch - 1) if stretch else ()):
            if not (workers := workers & self._holders.get(place, 0)):
                break
            before.append(workers)
        return before

    def _ends_within(self, stretch: int, workers: Workers) -> Iterator[tuple[int, Workers]]:
        """Yield where the runs of workers end that hold a stretch's first block, with those whose runs end there."""
        places = self._places(stretch)
        for place in places:
            still = workers & self._holders.get(place, 0)
            if still != workers:
                yield place, workers ^ still
                workers = still
            if not workers:
                return
        yield places.stop, workers

    def _places(self, stretch: int) -> range:
        last = stretch + 1 == len(self._probes)
        return range(self._probes[stretch], self._length if last else self._probes[stretch + 1])

    def _latest_begin(self, end: int) -> int:
        """Return the last block with which a run may begin that counts and has this end."""
        return min(end - 1, self._rule.first_block(end - 1 if end == self._length else end))


class _Bits(dict[Entry, Workers]):
    """The bit of each entry that was met; 0 if the entry does not count."""

    def __init__(self, live: Mapping[int, tuple[str, int]]) -> None:
        self._live = live
        self.worker_ids: list[str] = []
        self.unknown: set[int] = set()

    def __missing__(self, entry: Entry) -> Workers:
        worker_id, generation = self._live.get(entry[0], _NOBODY)
        if generation == entry[1]:
            self[entry] = 1 << len(self.worker_ids)
            self.worker_ids.append(worker_id)
        else:
            self[entry] = 0
            self.unknown.add(entry[0])
        return self[entry]


def _numbers(workers: Workers) -> Iterator[int]:
    """Yield the number of each bit that is set."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
