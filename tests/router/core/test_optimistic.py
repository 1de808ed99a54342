"""What was just routed counts as a hit there: for how long, how deep, and how much of it is kept."""

from __future__ import annotations

from common.types import BlockHash
from router.core.optimistic import BURST_SECONDS, MEMORY_SECONDS, OptimisticIndex


def chain(text: str) -> list[BlockHash]:
    """Return one key for each letter; equal prefixes give equal keys."""
    return [BlockHash(text[: end + 1].ljust(16).encode()) for end in range(len(text))]


def test_a_prompt_like_one_that_was_routed_hits_as_far_as_it_is_equal() -> None:
    index = OptimisticIndex()
    index.remember("w0", chain("abcd"), now=0.0)
    assert index.lookup(chain("abxy"), ["w0", "w1"], now=1.0) == {"w0": 2}


def test_each_worker_has_its_own_depth() -> None:
    index = OptimisticIndex()
    index.remember("w0", chain("abcd"), now=0.0)
    index.remember("w1", chain("abc"), now=0.0)
    assert index.lookup(chain("abcd"), ["w0", "w1"], now=0.0) == {"w0": 4, "w1": 3}


def test_only_workers_that_are_asked_for_count() -> None:
    index = OptimisticIndex()
    index.remember("gone", chain("ab"), now=0.0)
    assert index.lookup(chain("ab"), ["w0"], now=0.0) == {}


def test_it_counts_for_a_burst_and_is_remembered_for_longer() -> None:
    index = OptimisticIndex()
    index.remember("w0", chain("ab"), now=0.0)
    later = BURST_SECONDS + 1.0
    assert index.lookup(chain("ab"), ["w0"], now=later) == {}
    assert index.lookup(chain("ab"), ["w0"], now=later, max_age=MEMORY_SECONDS) == {"w0": 2}


def test_routing_it_again_renews_it() -> None:
    index = OptimisticIndex()
    index.remember("w0", chain("abcd"), now=0.0)
    index.remember("w0", chain("ab"), now=4.0)
    assert index.lookup(chain("abcd"), ["w0"], now=BURST_SECONDS + 1.0) == {"w0": 2}


def test_the_least_recently_routed_leaves_first_and_its_deepest_block_before_its_root() -> None:
    index = OptimisticIndex(max_blocks=5)
    index.remember("w0", chain("abc"), now=0.0)
    index.remember("w0", chain("xyz"), now=1.0)
    assert len(index) == 5
    assert index.lookup(chain("abc"), ["w0"], now=1.0) == {"w0": 2}
    assert index.lookup(chain("xyz"), ["w0"], now=1.0) == {"w0": 3}


def test_a_chain_longer_than_the_index_is_kept_from_its_root() -> None:
    index = OptimisticIndex(max_blocks=3)
    index.remember("w0", chain("abcde"), now=0.0)
    assert index.lookup(chain("abcde"), ["w0"], now=0.0) == {"w0": 3}


def test_a_worker_that_lost_its_cache_is_forgotten() -> None:
    index = OptimisticIndex()
    index.remember("w0", chain("ab"), now=0.0)
    index.remember("w1", chain("a"), now=0.0)
    index.forget("w0")
    assert index.lookup(chain("ab"), ["w0", "w1"], now=0.0) == {"w1": 1}
    assert len(index) == 1
