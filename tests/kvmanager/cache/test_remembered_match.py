"""The match of a sequence that waits for blocks is made again only when something changes on which it depends."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from common.contracts.lease import Report
from common.contracts.types import FinishReason, MissReason, SequenceId
from kvmanager.cache.prefix_cache import PrefixCache, PrefixMatch
from kvmanager.cache.window_match import deciding_hashes
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, block_table, finish, hashes, make_ledger, play, prompt, reserve, seal

LONG = prompt(16 * 21)


def waiting_ledger() -> Ledger:
    """Return a pool of 24 blocks in which a prompt of 21 blocks waits, three of which another sequence holds."""
    ledger = make_ledger(24)
    admit(ledger, reserve(1, LONG[:49], max_len=80))
    admit(ledger, reserve(2, prompt(64, start=900), max_len=380))
    seal(ledger, 1, hashes(LONG[:48]))
    assert admit(ledger, reserve(3, LONG)) == ()
    return ledger


def matches(ledger: Ledger, **columns: Any) -> int:
    """Return how often the cache was searched for a match after a report."""
    ledger.apply_report(Report(**columns))
    ledger.check_invariants()
    longest = PrefixCache.find_longest_prefix
    with mock.patch.object(PrefixCache, "find_longest_prefix", autospec=True, side_effect=longest) as searched:
        ledger.schedule()
    ledger.check_invariants()
    return searched.call_count


def test_reports_about_other_blocks_need_no_new_match() -> None:
    ledger = waiting_ledger()
    other = hashes(prompt(64, start=900))
    assert matches(ledger, seal=((block_table(ledger, 2)[0], other[0]),)) == 0
    assert matches(ledger, reserve=(reserve(4, prompt(320, start=5000)),)) == 1  # for the record of its own wait
    assert matches(ledger) == 0
    assert matches(ledger, finished=((SequenceId(4), FinishReason.CANCELLED),)) == 0
    assert ledger.pool_counts().capacity == 1


def test_a_hit_that_is_released_is_matched_anew() -> None:
    ledger = waiting_ledger()
    assert matches(ledger, finished=((SequenceId(1), FinishReason.STOP),)) == 1
    assert ledger.pool_counts().capacity == 1
    assert ledger.state.store.remembered is not None
    assert ledger.state.store.remembered.cached_hits == 3


def test_a_block_more_that_is_sealed_is_a_hit() -> None:
    ledger = waiting_ledger()
    table = block_table(ledger, 1)
    assert matches(ledger, seal=((table[3], hashes(LONG)[3]),)) == 1
    assert ledger.state.store.remembered is not None
    assert len(ledger.state.store.remembered.hits) == 4
    finish(ledger, 2)
    assert block_table(ledger, 3)[:4] == table


def test_a_hit_that_is_evicted_while_the_sequence_waits_is_no_hit() -> None:
    ledger = waiting_ledger()
    finish(ledger, 1)
    held = ledger.pool_counts().free
    play(ledger, lease_want=3 * (held + 1))  # a third is leased, which evicts the last of the three
    assert ledger.state.store.remembered is not None
    assert len(ledger.state.store.remembered.hits) == 2
    ledger.check_invariants()


@pytest.mark.parametrize("window", [1, 2, 16, 40])
def test_with_a_window_the_last_hit_decides_however_few_blocks_are_read(window: int) -> None:
    """A window of one token reads no block, and yet the hit before it may leave."""
    config, known = make_ledger(24, window=window).state.config, hashes(LONG)
    lacks_nothing = mock.Mock(spec=PrefixCache)
    deciding = deciding_hashes(lacks_nothing, config, known, len(LONG), PrefixMatch(5, MissReason.NEVER_SEEN))
    assert {known[0], known[4], known[5]} <= deciding
