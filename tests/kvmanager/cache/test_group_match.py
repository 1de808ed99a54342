"""Hits where the pool has groups, by exact places and against a search of every boundary.

A line of a picture is a group: x a sealed block, p and q blocks that sequences 1 and 2 fill, o one that was evicted.
Blocks have 4 slots. Behind block n a window of 8 reads blocks n - 2 and n - 1, and a chunk of 8 those from its start.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.hashing import group_in, key_of
from common.contracts.types import BlockHash, BlockId, KvGroup, KvGroupKind, MissReason, SequenceId
from kvmanager.cache.group_match import GroupMatch, GroupMatcher
from kvmanager.cache.prefix_cache import PrefixCache, PrefixMatch
from kvmanager.contracts.block import ROOT, Blocks
from kvmanager.contracts.ledger_config import LedgerConfig
from tests.support.kvmanager.ledgers import hashes, prompt

SIZE = 4
FULL = KvGroup(KvGroupKind.FULL, 0, 1, ())
WINDOW = KvGroup(KvGroupKind.WINDOW, 8, 2, ())
WIDE = KvGroup(KvGroupKind.WINDOW, 16, 1, ())
CHUNK = KvGroup(KvGroupKind.CHUNK, 8, 1, ())
STATE = KvGroup(KvGroupKind.STATE, 0, 3, ())
OWNERS = {"p": SequenceId(1), "q": SequenceId(2)}
PLACES = 8
KEYS = hashes(prompt(PLACES * SIZE), SIZE)


def block_at(group: int, place: int) -> BlockId:
    return BlockId(PLACES * group + place)


def matched(num_tokens: int, groups: tuple[KvGroup, ...], *pictures: str) -> GroupMatch:
    """Return the match of a prompt with so many tokens in a cache that the pictures show."""
    blocks = Blocks(PLACES * len(groups))
    cache = PrefixCache(blocks, 64, True, len(groups) - 1)
    for group, picture in enumerate(pictures):
        for place, what in enumerate(picture):
            draw(cache, blocks, group, place, what)
    config = LedgerConfig(len(blocks), SIZE, groups=groups)
    known = KEYS[: num_tokens // SIZE]
    return GroupMatcher(cache, blocks, config, known, num_tokens).match()


def draw(cache: PrefixCache, blocks: Blocks, group: int, place: int, what: str) -> None:
    """Put one block of a picture into a cache."""
    block, key = block_at(group, place), key_of(KEYS[place], group)
    before = KEYS[place - 1] if place else ROOT
    parent = KEYS[place] if group else before
    blocks.index[block], blocks.group[block] = place, group
    if what == "x":
        cache.register_block(block, key, parent)
    elif what in OWNERS:
        blocks.parent[block], blocks.owner[block] = parent, OWNERS[what]
        cache.expect_block(block, key)
    elif what == "o":
        cache.ghosts[key] = ("r9", "", 0, 0)


def found(match: GroupMatch) -> tuple[int, tuple[int, ...]]:
    """Return the hits, and how many places of each run are empty before its own; every block must be the right one."""
    hits = len(match.hits)
    assert match.match.hit_blocks == hits
    assert match.hits == [block_at(0, place) for place in range(hits)]
    for group, run in enumerate(match.runs, start=1):
        assert run.blocks == [block_at(group, place) for place in range(run.unread, hits)]
    return hits, tuple(run.unread for run in match.runs)


@pytest.mark.parametrize(
    ("pictures", "hits", "unread", "reason"),
    [
        (("xxxxx", ".x.xx"), 5, 3, MissReason.DIVERGED_AT),
        (("xxxxx", "xx..x"), 2, 0, MissReason.WINDOWED),
        (("xxxxx", "xxxx."), 4, 2, MissReason.WINDOWED),
        (("xxxxx", "....x"), 0, 0, MissReason.WINDOWED),
        (("xxxxx", "xxxo."), 3, 1, MissReason.EVICTED),
        (("xxxxxx", "....xx"), 6, 4, MissReason.FULL_HIT),
        (("xxo", "xx."), 2, 0, MissReason.EVICTED),
        (("", ""), 0, 0, MissReason.NEVER_SEEN),
        (("o", ""), 0, 0, MissReason.EVICTED),
        (("x", ""), 0, 0, MissReason.WINDOWED),
    ],
)
def test_a_prompt_hits_behind_all_that_a_window_reads(
    pictures: tuple[str, str], hits: int, unread: int, reason: MissReason
) -> None:
    match = matched(25, (FULL, WINDOW), *pictures)
    assert (found(match), match.match.miss_reason) == ((hits, (unread,)), reason)


@pytest.mark.parametrize(
    ("pictures", "hits", "unread"),
    [
        (("xxxxx", "....x"), 5, 4),
        (("xxxxx", "....."), 4, 4),
        (("xxx", "xx."), 2, 2),
        (("xxx", "..x"), 3, 2),
        (("x", "."), 0, 0),
        (("x", "x"), 1, 0),
    ],
)
def test_a_chunk_is_read_from_its_start(pictures: tuple[str, str], hits: int, unread: int) -> None:
    assert found(matched(25, (FULL, CHUNK), *pictures)) == (hits, (unread,))


@pytest.mark.parametrize(
    ("pictures", "hits", "unread"),
    [
        (("xxxxxx", "....xx", "xxxxxx"), 6, (4, 6)),
        (("xxxxxx", "...xx.", "....x."), 5, (3, 4)),
        (("xxxxxx", "..xx.x", "....x."), 4, (2, 4)),
        (("xxxxxx", "xx...x", "x....."), 2, (0, 2)),
    ],
)
def test_every_group_has_what_is_read(pictures: tuple[str, ...], hits: int, unread: tuple[int, ...]) -> None:
    assert found(matched(25, (FULL, WINDOW, CHUNK), *pictures)) == (hits, unread)


@pytest.mark.parametrize(
    ("groups", "pictures", "hits"),
    [
        # A token behind block 2 does not read block 0 in the window: the third place is for sealed blocks alone.
        ((FULL, WINDOW), ("pppp", "pppp"), 2),
        ((FULL, WIDE), ("pppp", "pppp"), 4),
        ((FULL, WIDE), ("pppp", "pp.p"), 2),
        ((FULL, WIDE), ("xxpp", "xxpp"), 4),
        ((FULL, WIDE), ("xxpp", ".xpp"), 0),
        ((FULL, CHUNK), ("pp", "pp"), 1),
    ],
)
def test_leading_blocks_are_shared_before_they_are_filled(
    groups: tuple[KvGroup, ...], pictures: tuple[str, str], hits: int
) -> None:
    assert found(matched(25, groups, *pictures)) == (hits, (0,))


@pytest.mark.parametrize(
    ("groups", "pictures", "hits", "unread", "why"),
    [
        ((FULL, STATE), ("xxxxx", "....x"), 5, (4,), (MissReason.DIVERGED_AT, 5)),
        ((FULL, STATE), ("xxxxx", ".x.x."), 4, (3,), (MissReason.UNRESUMABLE, 5)),
        ((FULL, STATE), ("xxxxx", "....."), 0, (0,), (MissReason.UNRESUMABLE, 5)),
        ((FULL, STATE), ("xxxxx", "x...o"), 1, (0,), (MissReason.EVICTED, 0)),
        ((FULL, STATE), ("xxxxx", "x..o."), 1, (0,), (MissReason.UNRESUMABLE, 5)),
        ((FULL, STATE), ("xxpp", ".x.."), 2, (1,), (MissReason.UNRESUMABLE, 4)),
        ((FULL, STATE), ("pppp", ""), 0, (0,), (MissReason.UNRESUMABLE, 4)),
        ((FULL, STATE), ("", ""), 0, (0,), (MissReason.NEVER_SEEN, 0)),
        ((FULL, WINDOW, STATE), ("xxxxx", "..xxx", ".x..x"), 5, (3, 4), (MissReason.DIVERGED_AT, 5)),
        ((FULL, WINDOW, STATE), ("xxxxx", "xx.xx", ".x.x."), 2, (0, 1), (MissReason.UNRESUMABLE, 5)),
    ],
)
def test_a_prompt_goes_on_from_the_deepest_checkpoint(
    groups: tuple[KvGroup, ...],
    pictures: tuple[str, ...],
    hits: int,
    unread: tuple[int, ...],
    why: tuple[MissReason, int],
) -> None:
    match = matched(25, groups, *pictures)
    assert found(match) == (hits, unread)
    assert (match.match.miss_reason, match.match.diverged_at) == why
    assert match.sealed == pictures[0].count("x"), "there a checkpoint is worth taking"


@pytest.mark.parametrize("place", ["pq", "xp"])
def test_the_blocks_of_a_place_are_filled_together(place: str) -> None:
    """Two sequences fill them slot by slot, each its own: no third one has a place at which both are filled."""
    assert found(matched(25, (FULL, WIDE), f"x{place[0]}", f"x{place[1]}")) == (1, (0,))


def test_sealed_blocks_behind_missing_ones_outdo_leading_ones() -> None:
    assert found(matched(25, (FULL, WINDOW), "xxxx", "x.xx")) == (4, (2,))


@pytest.mark.parametrize(
    ("num_tokens", "hits", "reason"),
    [(8, 1, MissReason.CAPPED), (9, 2, MissReason.FULL_HIT), (3, 0, MissReason.BELOW_BLOCK)],
)
def test_the_block_of_the_last_token_is_no_hit(num_tokens: int, hits: int, reason: MissReason) -> None:
    match = matched(num_tokens, (FULL, WINDOW), "xxxx", "xxxx")
    assert (found(match)[0], match.match.miss_reason) == (hits, reason)


def test_the_reason_names_who_needed_the_room_of_a_block_of_a_run() -> None:
    match = matched(25, (FULL, WINDOW, CHUNK), "xxxxx", "xxxxx", "....o").match
    assert match == PrefixMatch(4, MissReason.EVICTED)
    assert match.evicted_for == "r9"


def test_a_prompt_that_diverges_says_where() -> None:
    match = matched(25, (FULL, WINDOW), "xxx", "xxx").match
    assert match == PrefixMatch(3, MissReason.DIVERGED_AT, 3)


@given(st.data())
def test_no_boundary_behind_it_has_what_every_group_reads(data: st.DataObject) -> None:
    groups = (FULL, *data.draw(st.lists(st.sampled_from([WINDOW, WIDE, CHUNK]), min_size=1, max_size=2)))
    groups += (STATE,) * data.draw(st.booleans())
    full = "x" * data.draw(st.integers(0, PLACES)) + data.draw(st.text("pq", max_size=PLACES))
    full = full[:PLACES]
    waits = {group: "." if group is STATE else "pq." for group in groups}  # no checkpoint is shared before it is saved
    runs = [
        "".join(data.draw(st.sampled_from("x." if above == "x" else waits[group])) for above in full)
        for group in groups[1:]
    ]
    num_tokens = data.draw(st.integers(1, PLACES * SIZE))
    most = min(len(full), (num_tokens - 1) // SIZE)
    deepest = max(hits for hits in range(most + 1) if is_resumable(groups, (full, *runs), hits))
    assert found(matched(num_tokens, groups, full, *runs))[0] == deepest


def is_resumable(groups: tuple[KvGroup, ...], pictures: tuple[str, ...], hits: int) -> bool:
    """Return whether a sequence may begin behind so many places: all that is read is sealed, or leads and is filled."""
    reads = [{place for place in range(hits) if is_read(group, hits * SIZE, place)} for group in groups]
    sealed = all(pictures[group][place] == "x" for group, read in enumerate(reads) for place in read)
    alike = all(len({picture[place] for picture in pictures}) == 1 for place in range(hits))
    whole = all(len(read) == hits for read in reads) and "." not in "".join(picture[:hits] for picture in pictures)
    return sealed or (alike and whole)


def is_read(group: KvGroup, position: int, place: int) -> bool:
    """Return whether the token at a position reads a slot of a block."""
    last = place * SIZE + SIZE - 1
    if group.kind is KvGroupKind.STATE:
        return last == position - 1
    if group.kind is KvGroupKind.CHUNK:
        return last >= position // group.span * group.span
    return not group.span or last > position - group.span


# ---------------------------------------------------------------- what could come: d is on disk, or at a peer


def matcher_of(groups: tuple[KvGroup, ...], *pictures: str) -> tuple[GroupMatcher, set[BlockHash]]:
    """Return the matcher of a prompt of 33 tokens, and the keys of what is elsewhere."""
    blocks = Blocks(PLACES * len(groups))
    cache, elsewhere = PrefixCache(blocks, 64, True, len(groups) - 1), set[BlockHash]()
    for group, picture in enumerate(pictures):
        for place, what in enumerate(picture):
            draw(cache, blocks, group, place, what)
            if what == "d":
                elsewhere.add(key_of(KEYS[place], group))
    config = LedgerConfig(len(blocks), SIZE, groups=groups)
    return GroupMatcher(cache, blocks, config, KEYS, PLACES * SIZE + 1), elsewhere


def reached(
    groups: tuple[KvGroup, ...], *pictures: str, hits: int = 0, most: int = 99, most_pages: int = 99
) -> tuple[int, list[tuple[int, int]]]:
    """Return the deepest boundary that can be reached, and the groups and places of what is to come for it."""
    matcher, elsewhere = matcher_of(groups, *pictures)
    boundary = matcher.find_boundary(lambda key, _, __: key in elsewhere, hits, most, most_pages)
    lacks = matcher.lacking(boundary) if boundary > hits else []
    assert {each.key for each in lacks} <= elsewhere
    return boundary, [(group_in(each.key), each.depth) for each in lacks]


@pytest.mark.parametrize(
    ("groups", "pictures", "expected"),
    [
        ((FULL, WINDOW), ("xxdddd", "....ddd"), (6, [(0, 2), (0, 3), (0, 4), (1, 4), (0, 5), (1, 5)])),
        ((FULL, WINDOW), ("xxdddd", "...dd.d"), (5, [(0, 2), (0, 3), (1, 3), (0, 4), (1, 4)])),
        ((FULL, WINDOW), ("xxxx", "xxdd"), (4, [(1, 2), (1, 3)])),
        ((FULL, WINDOW), ("dddd", "...d"), (0, [])),
        ((FULL, CHUNK), ("xxdddd", "..."), (6, [(0, 2), (0, 3), (0, 4), (0, 5)])),
        ((FULL, STATE), ("xxxxxx", ".d..d."), (5, [(1, 4)])),
        ((FULL, STATE), ("xxdd..", ".d.d.d"), (4, [(0, 2), (0, 3), (1, 3)])),
        ((FULL, STATE), ("xxpddd", ".....d"), (0, [])),
        ((FULL, STATE), ("xx.ddd", ".....d"), (0, [])),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) and isinstance(each[0], str) else None,
)
def test_a_prompt_could_go_on_where_each_group_has_what_is_read(
    groups: tuple[KvGroup, ...], pictures: tuple[str, ...], expected: tuple[int, list[tuple[int, int]]]
) -> None:
    boundary, lacks = reached(groups, *pictures)
    assert (boundary, sorted(lacks, key=lambda each: (each[1], each[0]))) == (
        expected[0],
        sorted(expected[1], key=lambda each: (each[1], each[0])),
    )
    assert [place for _, place in lacks] == sorted(place for _, place in lacks), "parents first"


def test_without_room_for_all_of_it_a_shallower_boundary_is_reached() -> None:
    pictures = ("dddddddd", "dddddddd")
    assert reached((FULL, WINDOW), *pictures)[0] == 8
    # Eight blocks of the first group, and two of the window of two pages each.
    assert reached((FULL, WINDOW), *pictures, most_pages=12)[0] == 8
    boundary, lacks = reached((FULL, WINDOW), *pictures, most_pages=9)
    assert (boundary, len(lacks)) == (5, 7)
    assert reached((FULL, WINDOW), *pictures, most=6) == (
        4,
        [*((g, p) for p in range(4) for g in (0, 1) if not g or p > 1)],
    )
    assert reached((FULL, WINDOW), *pictures, most_pages=2) == (0, [])
    assert reached((FULL, WINDOW), *pictures, hits=8) == (8, [])


def test_no_more_places_are_looked_at_than_may_come() -> None:
    """A peer may have all of a long prompt: it is asked for what one fetch brings, behind what is there."""
    matcher, elsewhere = matcher_of((FULL, STATE), "xxdddddd", "..dddddd")
    asked = list[tuple[int, int]]()

    def has(key: BlockHash, _: BlockHash, depth: int) -> bool:
        asked.append((group_in(key), depth))
        return key in elsewhere

    assert matcher.find_boundary(has, 0, 3, 99) == 4
    assert asked == [(0, 2), (0, 3), (0, 4), (1, 4), (1, 3)]


def test_what_a_boundary_lacks_says_where_it_stands() -> None:
    matcher, _ = matcher_of((FULL, STATE), "xdd", "..d")
    assert matcher.lacking(3) == [(KEYS[1], KEYS[0], 1), (KEYS[2], KEYS[1], 2), (key_of(KEYS[2], 1), KEYS[2], 2)]
    assert KEYS[0] not in matcher.absent_keys()
    assert {KEYS[1], key_of(KEYS[0], 1), key_of(KEYS[7], 1)} <= matcher.absent_keys()
