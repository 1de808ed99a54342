"""The index of parts of cached blocks: contents that begin alike come and go, and the longest part is found."""

from __future__ import annotations

from random import Random

from common.contracts.hashing import partial_hashes
from common.contracts.types import BlockHash
from kvmanager.cache.prefix_cache import PartialIndex

SIZE = 64


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_contents_that_begin_alike_come_and_go_in_any_order() -> None:
    index, quarter = PartialIndex(), content(99)
    for number in range(4):
        index.add(content(number), (quarter, content(100 + number)))
    for gone in (0, 2, 3):
        index.forget(content(gone))
        found = index.find((quarter, content(100 + gone)))
        assert found is not None
        assert found[1] == 1
        assert found[0] != content(gone)
    assert index.find((quarter,)) == (content(1), 1)
    index.forget(content(1))
    index.forget(content(1))
    assert (index.parts, index.first, index.others) == ({}, {}, {})


def test_the_most_parts_in_common_are_found_whatever_came_and_went() -> None:
    """Beside a plain search of all contents, with few parts so that many begin alike."""
    for seed in range(40):
        chosen, index = Random(seed), PartialIndex()
        known: dict[BlockHash, tuple[BlockHash, ...]] = {}
        for _ in range(120):
            prefix = ""
            path = tuple([content(int(prefix := prefix + chosen.choice("123"))) for _ in range(3)])
            wanted = max((common_parts(each, path) for each in known.values()), default=0)
            found = index.find(path)
            assert (found[1] if found else 0) == wanted
            assert found is None or common_parts(known[found[0]], path) == wanted
            new = content(1_000_000 + chosen.randrange(30))
            if known.pop(new, None) is None:
                known[new] = path
                index.add(new, path)
            else:
                index.forget(new)
        for each in known:
            index.forget(each)
        assert (index.parts, index.first, index.others) == ({}, {}, {})


def common_parts(one: tuple[BlockHash, ...], two: tuple[BlockHash, ...]) -> int:
    return next((at for at in range(3) if one[at] != two[at]), 3)


def test_a_content_alone_with_its_first_part_has_one_key() -> None:
    """Three keys each would take 200 bytes more for every cached block of 64 slots."""
    index = PartialIndex()
    for number in range(10):
        index.add(content(number), tuple(content(100 + 3 * number + at) for at in range(3)))
    assert (len(index.first), index.others) == (10, {})


def test_two_parts_of_one_short_key_are_no_match() -> None:
    index = PartialIndex()
    index.add(content(1), (content(9),))
    assert index.find((BlockHash(b"x" * 9 + content(9)[9:]),)) is None


def test_a_worker_that_names_one_part_three_times_does_no_harm() -> None:
    index = PartialIndex()
    index.add(content(1), (content(9),) * 3)
    index.add(content(2), (content(9),) * 3)
    index.forget(content(1))
    assert index.find((content(9),) * 3) == (content(2), 3)
    index.forget(content(2))
    assert (index.parts, index.first, index.others) == ({}, {}, {})


def test_partial_hashes_are_of_one_prefix_and_need_their_tokens() -> None:
    packed = bytes(range(256))
    one, two = partial_hashes(content(1), packed, SIZE), partial_hashes(content(2), packed, SIZE)
    assert len({*one, *two}) == 6
    assert [len(partial_hashes(content(1), packed[: 4 * slots], SIZE)) for slots in (15, 16, 47, 48, 64)] == [
        0, 1, 2, 3, 3,
    ]  # fmt: skip
    assert partial_hashes(content(1), packed[:128], SIZE) == one[:2]
