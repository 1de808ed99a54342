"""What was just routed counts as a hit there: for how long, how deep, and how much of it is kept."""

from __future__ import annotations

from common.contracts.types import BlockHash
from router.placement.routed_prefixes import BURST_SECONDS, MEMORY_SECONDS, RoutedPrefixes


def block_hashes(text: str) -> list[BlockHash]:
    """Return one key for each letter; equal prefixes give equal keys."""
    return [BlockHash(text[: end + 1].ljust(16).encode()) for end in range(len(text))]


def test_a_prompt_like_one_that_was_routed_hits_as_far_as_it_is_equal() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("abcd"), now=0.0)
    assert index.lookup(block_hashes("abxy"), now=1.0) == {"w0": 2}


def test_each_worker_has_its_own_depth() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("abcd"), now=0.0)
    index.remember("w1", block_hashes("abc"), now=0.0)
    assert index.lookup(block_hashes("abcd"), now=0.0) == {"w0": 4, "w1": 3}


def test_it_counts_for_a_burst_and_is_remembered_for_longer() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("ab"), now=0.0)
    later = BURST_SECONDS + 1.0
    assert index.lookup(block_hashes("ab"), now=later) == {}
    assert index.lookup(block_hashes("ab"), now=later, max_age=MEMORY_SECONDS) == {"w0": 2}


def test_routing_it_again_renews_it() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("abcd"), now=0.0)
    index.remember("w0", block_hashes("ab"), now=4.0)
    assert index.lookup(block_hashes("abcd"), now=BURST_SECONDS + 1.0) == {"w0": 2}


def test_the_least_recently_routed_leaves_first_and_its_deepest_block_before_its_root() -> None:
    index = RoutedPrefixes(max_blocks=5)
    index.remember("w0", block_hashes("abc"), now=0.0)
    index.remember("w0", block_hashes("xyz"), now=1.0)
    assert len(index) == 5
    assert index.lookup(block_hashes("abc"), now=1.0) == {"w0": 2}
    assert index.lookup(block_hashes("xyz"), now=1.0) == {"w0": 3}


def test_what_nobody_asks_for_any_more_leaves_as_others_come() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("abcdef"), now=0.0)
    index.remember("w0", block_hashes("ab"), now=1.0)
    later = MEMORY_SECONDS + 1.0
    index.remember("w0", block_hashes("x"), now=later)
    assert len(index) == 6 + 1 - 2, "twice as many leave as came"
    index.remember("w0", block_hashes("xyz"), now=later + 0.5)
    assert len(index) == 3
    assert index.lookup(block_hashes("ab"), now=later, max_age=MEMORY_SECONDS) == {}


def test_a_chain_longer_than_the_index_is_kept_from_its_root() -> None:
    index = RoutedPrefixes(max_blocks=3)
    index.remember("w0", block_hashes("abcde"), now=0.0)
    assert index.lookup(block_hashes("abcde"), now=0.0) == {"w0": 3}


def test_a_worker_that_lost_its_cache_is_forgotten() -> None:
    index = RoutedPrefixes()
    index.remember("w0", block_hashes("ab"), now=0.0)
    index.remember("w1", block_hashes("a"), now=0.0)
    index.forget("w0")
    assert index.lookup(block_hashes("ab"), now=0.0) == {"w1": 1}
    assert len(index) == 1
