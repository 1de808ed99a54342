"""Claims that are found by hash: what is claimed no more is not found."""

from __future__ import annotations

from common.contracts.types import BlockHash, BlockId
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.claims_by_hash import ClaimsByHash


def content(number: int) -> Content:
    return Content(BlockHash(number.to_bytes(16, "big")), None, 0, 0)


def key(number: int) -> BlockHash:
    return content(number).hash


def test_a_content_is_found_where_it_was_set_last() -> None:
    claims = ClaimsByHash()
    claims[BlockId(3)] = content(1)
    claims[BlockId(5)] = content(1)
    assert claims.find(key(1)) == 5
    claims[BlockId(3)] = content(2)
    assert (claims.find(key(1)), claims.find(key(2)), claims.find(key(9))) == (5, 3, None)


def test_what_was_dropped_or_replaced_is_not_found() -> None:
    claims = ClaimsByHash()
    claims[BlockId(3)] = content(1)
    claims[BlockId(3)] = content(2)
    assert claims.find(key(1)) is None, "the block holds something else"
    claims.pop(BlockId(3), None)
    assert claims.find(key(2)) is None
    claims[BlockId(4)] = content(4)
    del claims[BlockId(4)]
    claims[BlockId(6)] = content(6)
    claims[BlockId(6)] = None
    assert (claims.find(key(4)), claims.find(key(6))) == (None, None)
    claims[BlockId(7)] = content(7)
    claims.clear()
    assert claims.find(key(7)) is None


def test_hashes_of_before_do_not_gather() -> None:
    claims = ClaimsByHash()
    for number in range(10_000):
        claims[BlockId(number % 4)] = content(number)
    assert len(claims._places) <= 2 * 4 + 1024 + 1
    assert [claims.find(key(number)) for number in (9_996, 9_997, 9_998, 9_999)] == [0, 1, 2, 3]
    assert claims.find(key(9_995)) is None
