"""Runs of blocks where layers have windows or chunks: few reads find what a reader of all blocks finds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.index_format import pack_entry, unpack_entries
from common.contracts.types import KvGroup, KvGroupKind
from router.placement.run_rule import RunRule
from router.placement.run_search import RunSearch

_MANY: Final = 64
LIVE = {0: ("w0", 100), 1: ("w1", 200), 2: ("w2", 300)}


def windowed(*spans: int) -> list[KvGroup]:
    return [KvGroup(KvGroupKind.WINDOW, span, 1, ()) for span in spans]


def chunked(*spans: int) -> list[KvGroup]:
    return [KvGroup(KvGroupKind.CHUNK, span, 1, ()) for span in spans]


spans = st.integers(1, 24)
several = st.lists(
    st.builds(KvGroup, st.sampled_from([KvGroupKind.WINDOW, KvGroupKind.CHUNK]), spans, st.just(1), st.just(())),
    min_size=1,
    max_size=3,
)
runs = st.one_of(spans.map(windowed), spans.map(chunked), several)


def first_slot(groups: Sequence[KvGroup], position: int) -> int:
    """Return the first slot that the token at a position reads in any of the groups."""
    chunks = [position // each.span * each.span for each in groups if each.kind is KvGroupKind.CHUNK]
    return max(0, min([*chunks, *(position - each.span + 1 for each in groups if each.kind is KvGroupKind.WINDOW)]))


def value(*slots: int, generations: tuple[int, ...] = (100, 200, 300)) -> bytes:
    return b"".join(pack_entry(slot, generations[slot]) for slot in slots)


def found(
    values: Sequence[bytes | None], groups: Sequence[KvGroup] = (), block_size: int = 4
) -> tuple[RunSearch, list[int]]:
    """Return a search over these values at its end, and the places that it read; a window of 8 if nothing is said."""
    rule = RunRule(groups or windowed(8), block_size)
    search, read = RunSearch(LIVE, unpack_entries, rule, len(values)), list[int]()
    while places := search.wanted():
        read += places
        search.feed([values[place] for place in places])
    assert len(read) == len(set(read)), "no block is read twice"
    return search, read


def hits(values: Sequence[bytes | None], groups: Sequence[KvGroup] = ()) -> dict[str, int]:
    return found(values, groups)[0].hits()


class OneByOne:
    """A second implementation: it follows each worker by itself, with sets and without the search's shortcuts."""

    def __init__(
        self, live: dict[int, tuple[str, int]], groups: Sequence[KvGroup], block_size: int, length: int
    ) -> None:
        self.live, self.groups, self.block_size, self.length = live, groups, block_size, length
        self.probes: list[int] = []
        for end in range(1, length + 1):
            if not any(self.begin_of(end, capped=False) <= each for each in self.probes):
                self.probes.append(end - 1)
        if self.probes[1:] and self.probes[-1] == length - 1 and self.begin_of(length) < self.probes[-2]:
            del self.probes[-1]
        self.held: dict[int, set[int]] = {}
        self.asked: set[int] = set()
        self.queue = list(self.probes)

    def begin_of(self, end: int, capped: bool = True) -> int:
        """Return the first block of the shortest run that counts with this end."""
        read = end - (capped and end == self.length)
        return min(end - 1, first_slot(self.groups, read * self.block_size) // self.block_size)

    def feed(self, holders: Sequence[set[int]]) -> None:
        self.held.update(zip(self.queue[: len(holders)], holders, strict=True))
        del self.queue[: len(holders)]
        while not self.queue:
            asked = set[int]().union(*(self.missing(slot) for slot in self.live))
            if not asked:
                return
            self.asked |= asked
            for stretch in sorted(asked, reverse=True):
                self.queue += self.places(stretch)[1:]

    def hits(self) -> dict[str, int]:
        found = dict[str, int]()
        for slot, (worker_id, _) in self.live.items():
            if end := next(filter(None, (self.end(slot, stretch) for stretch in self.stretches(slot))), 0):
                found[worker_id] = max(end, found.get(worker_id, 0))
        return found

    def missing(self, slot: int) -> set[int]:
        for stretch in self.stretches(slot):
            if missing := {stretch, max(0, stretch - 1)} - self.asked:
                return missing
            if self.end(slot, stretch):
                break
        return set()

    def stretches(self, slot: int) -> list[int]:
        return [each for each in reversed(range(len(self.probes))) if self.holds(slot, self.probes[each])]

    def places(self, stretch: int) -> range:
        return range(self.probes[stretch], [*self.probes, self.length][stretch + 1])

    def holds(self, slot: int, place: int) -> bool:
        return slot in self.held.get(place, ())

    def end(self, slot: int, stretch: int) -> int:
        """Return where the run ends that has the first block of a stretch; 0 if it does not count."""
        begin = end = self.probes[stretch]
        while end < self.places(stretch).stop and self.holds(slot, end):
            end += 1
        while begin > self.probes[max(0, stretch - 1)] and self.holds(slot, begin - 1):
            begin -= 1
        return end if begin <= self.begin_of(end) else 0


def test_a_run_counts_that_reaches_back_as_far_as_a_token_sees() -> None:
    """With a window of 8, the first token behind 5 blocks of 4 sees the last two of them."""
    values = [None, None, None, value(0), value(0, 1), value(1), None, value(0), None]
    assert hits(values) == {"w0": 5, "w1": 6}


def test_a_run_that_is_too_short_does_not_count() -> None:
    assert hits([value(0), None, None, value(0), None, value(0)]) == {"w0": 1}


def test_a_run_up_to_the_last_block_counts_if_it_counts_without_that_block() -> None:
    """The manager gives no hit on the block of the last token; the hits before it need a block more."""
    assert hits([None, None, None, value(0), value(0)]) == {}
    assert hits([None, None, value(0), value(0), value(0)]) == {"w0": 5}


def test_a_chunk_needs_its_blocks_up_to_the_boundary_alone() -> None:
    """Chunks of 16 slots are 4 blocks: at block 6 the next token reads blocks 4 and 5."""
    assert hits([None, None, None, None, value(0, 1), value(0), value(1), None], chunked(16)) == {"w0": 6, "w1": 5}


def test_at_the_boundary_of_a_chunk_the_block_before_is_asked_for() -> None:
    """Nothing before the chunk is read there, and the block says that the full layers have all blocks up to it."""
    assert hits([None, None, None, value(0), None, None], chunked(16)) == {"w0": 4}
    assert hits([None, None, value(0), None, None, None], chunked(16)) == {}


def test_of_several_groups_the_longest_run_is_needed() -> None:
    """At block 6 a window of 8 slots reads blocks 4 and 5, and a chunk of 24 all six blocks but none behind it."""
    values = [value(1), value(1), value(1), value(1), value(0, 1), value(0, 1), None, None, None]
    assert hits(values, windowed(8)) == {"w0": 6, "w1": 6}
    assert hits(values, [*windowed(8), *chunked(32)]) == {"w1": 6}
    values = [None, None, None, None, None, value(0), value(0, 1), value(1), None, None]
    assert hits(values, [*windowed(8), *chunked(12)]) == {"w0": 7, "w1": 8}
    assert hits(values, [*windowed(8), *chunked(20)]) == {"w0": 7}
    assert hits(values, [*windowed(5, 12), *chunked(12)]) == {}


def test_probes_are_few_where_chunks_are_large() -> None:
    """Each chunk needs its first block or is at its boundary."""
    _, read = found([None] * 2048, chunked(8192), 16)
    assert read == [0, 511, 512, 1023, 1024, 1535, 1536, 2047]


@given(runs, st.sampled_from([1, 2, 4]), st.integers(0, 60))
def test_probes_are_the_fewest_blocks_of_which_each_run_has_one(
    groups: Sequence[KvGroup], block_size: int, length: int
) -> None:
    rule = RunRule(groups, block_size)
    begins = [first_slot(groups, boundary * block_size) // block_size for boundary in range(length + 1)]
    assert [rule.first_block(boundary) for boundary in range(length + 1)] == begins
    wanted: list[int] = []
    for boundary in range(1, length + 1):
        if not any(min(begins[boundary], boundary - 1) <= each for each in wanted):
            wanted.append(boundary - 1)
    assert rule.probes(length) == wanted
    assert rule.probes(length // 2) == [each for each in wanted if each < length // 2]


def test_entries_of_other_generations_end_no_run_and_are_named() -> None:
    search, _ = found([value(0), value(0), value(0, 1, generations=(100, 7)), value(0)])
    assert search.hits() == {"w0": 4}
    assert search.unknown == {1}


def test_no_block_is_no_search() -> None:
    search, read = found([])
    assert (search.probed, search.hits(), read) == (True, {}, [])


@pytest.mark.parametrize("window", [4096, 4081, 4082])
def test_a_prompt_without_hits_needs_a_block_of_each_window(window: int) -> None:
    _, read = found([None] * 2048, windowed(window), 16)
    assert read == list(range(0, 2048, -(-(window - 1) // 16)))


def test_hits_to_the_end_need_the_blocks_of_two_windows() -> None:
    search, read = found([value(0)] * 2048, windowed(4096), 16)
    assert search.hits() == {"w0": 2048}
    assert sorted(read) == sorted({*range(0, 2048, 256), *range(1536, 2048)})


def test_a_search_that_is_cut_knows_what_the_blocks_read_so_far_prove() -> None:
    values = [value(0, 1)] * 6 + [value(0)] * 2042
    search = RunSearch(LIVE, unpack_entries, RunRule(windowed(4096), 16), 2048)
    assert search.wanted() == list(range(0, 2048, 256))
    search.feed([values[place] for place in search.wanted()])
    assert search.hits() == {"w0": 1, "w1": 1}, "the first block alone proves a hit"
    search.feed([values[place] for place in search.wanted()])
    assert search.hits() == {"w0": 2048, "w1": 3}
    search.feed([values[place] for place in search.wanted()])
    assert search.hits() == {"w0": 2048, "w1": 6}


def test_at_most_512_blocks_are_wanted_at_once() -> None:
    search = RunSearch(LIVE, unpack_entries, RunRule(windowed(16), 16), 2048)
    sizes = []
    while places := search.wanted():
        sizes.append(len(places))
        search.feed([None] * len(places))
    assert sizes == [512] * 4


@given(st.data(), runs, st.sampled_from([1, 2, 4]), st.integers(0, 40))
def test_the_hits_are_those_that_a_look_at_each_depth_finds(
    data: st.DataObject, groups: Sequence[KvGroup], block_size: int, length: int
) -> None:
    """Each worker holds stretches of blocks, so that some are as long as the windows and chunks."""
    held = [
        [at for at, many in enumerate(data.draw(st.lists(st.integers(0, 12), max_size=10))) for _ in range(many)]
        for _ in LIVE
    ]
    holds = [[at < len(each) and each[at] % 2 == 0 for at in range(length)] for each in held]
    values = [value(*(slot for slot in LIVE if holds[slot][at])) or None for at in range(length)]
    depths = {worker: set[int]() for worker, _ in LIVE.values()}
    for slot, (worker, _) in LIVE.items():
        for depth in range(1, length + 1):
            # At the end of all blocks, the last token may be in the last one.
            next_token = block_size * (depth - (depth == length))
            seen = {at // block_size for at in range(first_slot(groups, next_token), next_token)}
            if holds[slot][depth - 1] and all(holds[slot][block] for block in {*seen, depth - 1} if block < depth):
                depths[worker].add(depth)
    search = RunSearch(LIVE, unpack_entries, RunRule(groups, block_size), length)
    while places := search.wanted()[:3]:
        assert all(depth in depths[worker] for worker, depth in search.hits().items()), "a cut search claims too much"
        search.feed([values[place] for place in places])
    assert search.hits() == {worker: max(each) for worker, each in depths.items() if each}


@given(st.data(), runs, st.sampled_from([1, 2, 4]), st.integers(0, 60), st.integers(1, 40))
def test_all_workers_at_once_are_followed_as_one_by_one(
    data: st.DataObject, groups: Sequence[KvGroup], block_size: int, length: int, at_once: int
) -> None:
    """Same blocks wanted, and same hits, after each answer; slots of one worker and old entries included."""
    live = {slot: (f"w{slot % 5}", slot) for slot in range(7)}
    chance, seed = data.draw(st.sampled_from([0.3, 0.8, 0.95, 1.0])), data.draw(st.integers(0, 1 << 32))
    draw = random.Random(seed)
    holders = [{slot for slot in range(8) if draw.random() < chance} for _ in range(length)]
    # Slot 7 has no owner, and some entries of slot 0 are of another generation.
    stale = [draw.random() < 0.1 for _ in range(length)]
    values = [
        b"".join(pack_entry(slot, slot + (stale[at] and slot == 0)) for slot in draw.sample(sorted(each), len(each)))
        for at, each in enumerate(holders)
    ]
    counting = [each - {7} - ({0} if stale[at] else set()) for at, each in enumerate(holders)]
    search, reference = (
        RunSearch(live, unpack_entries, RunRule(groups, block_size), length),
        OneByOne(live, groups, block_size, length),
    )
    read = set[int]()
    while places := search.wanted()[:at_once]:
        assert search.wanted() == reference.queue
        assert search.hits() == reference.hits()
        search.feed([values[place] or None for place in places])
        reference.feed([counting[place] for place in places])
        read |= set(places)
    assert reference.queue == []
    assert search.hits() == reference.hits()
    assert search.unknown == {slot for at in read for slot in holders[at] - counting[at]}


def calls(run: Callable[[], object]) -> int:
    """Return how many functions `run` calls or resumes."""
    counted = 0

    def count(frame: object, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize(("window", "chance"), [(257, 0.5), (2049, 0.9), (8193, 0.98)])
def test_a_turn_does_not_cost_more_for_each_worker_of_a_block(window: int, chance: float) -> None:
    """Each block has other holders. Work for each block and worker would be 0.3 s in one turn for 256 workers."""
    draw, length = random.Random(7), 2048
    live = {slot: (f"w{slot}", 0) for slot in range(_MANY)}
    entries = [[(slot, 0) for slot in range(_MANY) if draw.random() < chance] for _ in range(length)]
    rule = RunRule(windowed(window), 16)
    search, most = RunSearch(live, lambda value: entries[int(value)], rule, length), 0
    while places := search.wanted():
        answer = partial(search.feed, [str(place).encode() for place in places])
        most = max(most, calls(answer), calls(search.hits))
    assert most < 4 * length
