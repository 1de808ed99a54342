"""What readers of counts are told of a pool that counts pages."""

from __future__ import annotations

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.types.v1 import types_pb2
from router.observe.pool_words import held_words, name_of, pages_of_block, pages_words

ONE = KvGeometry(2, 1, 8, 8, "float32")
FULL = KvGroup(KvGroupKind.FULL, 0, 4, (5,))
WINDOW = KvGroup(KvGroupKind.WINDOW, 1024, 21, (0, 1))
CHUNK = KvGroup(KvGroupKind.CHUNK, 8192, 3, (2,))


def test_a_pool_of_blocks_needs_no_words() -> None:
    assert (pages_words(ONE, 16), pages_of_block(ONE)) == ("", 1)


def test_each_group_has_its_pages() -> None:
    shape = KvGeometry(4, 1, 8, 8, "float32", groups=(FULL, WINDOW, CHUNK))
    told = "16 tokens take 4 in full layers, 21 in windows of 1,024 and 3 in chunks of 8,192"
    assert pages_words(shape, 16) == f"Blocks are counted in pages: {told}"
    assert pages_of_block(shape) == 28


def test_a_group_has_the_name_of_its_kind_and_span() -> None:
    names = [name_of(each.kind, each.span) for each in (FULL, WINDOW, CHUNK)]
    assert names == ["full", "window of 1,024", "chunk of 8,192"]


def test_what_groups_hold_is_that_of_all_pools() -> None:
    def pool(in_use: int, cached: int) -> pb.Pool:
        full = pb.GroupUse(kind=types_pb2.KV_GROUP_KIND_FULL, pages=1, in_use=in_use, cached=cached)
        window = pb.GroupUse(kind=types_pb2.KV_GROUP_KIND_WINDOW, span=128, pages=2, in_use=1)
        return pb.Pool(groups=[full, window])

    told = "full: 1,200 blocks in use, 7 cached; window of 128: 2 blocks in use, 0 cached"
    assert held_words([pool(1000, 3), pool(200, 4)]) == told
    assert held_words([pb.Pool()]) == ""
