"""What readers of counts are told of a pool that counts pages."""

from __future__ import annotations

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from router.observe.pool_words import pages_of_block, pages_words

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
