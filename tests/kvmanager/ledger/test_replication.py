"""Which prefixes are hot, which worker gets them, and what the registry makes of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import CachedBlock, Inventory, Report
from common.contracts.types import BlockHash, BlockId
from kvmanager.contracts.ledger_config import ManagerConfig
from kvmanager.ledger import replication
from kvmanager.ledger.ahead_table import Outcome
from kvmanager.ledger.registry import WorkerRegistry
from kvmanager.ledger.replication import Choice, Hot, HotPrefixes, Standing, choose_worker, places_of
from tests.kvmanager.ledger.test_peers import FORMAT, KEY, attach, attached
from tests.support.kvmanager.ledgers import counted_ids, hashes, prompt, reserve

TALK = prompt(8 * 16 + 1)
KEYS = hashes(TALK)


def test_four_places_stand_for_each_doubling() -> None:
    assert list(places_of(0)) == []
    assert list(places_of(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(places_of(40)) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    assert len(list(places_of(1 << 16))) == 60


# ---------------------------------------------------------------- what is hot


def note(hot: HotPrefixes, now: float, worker: str, keys: Sequence[BlockHash]) -> list[tuple[int, set[str]]]:
    return [(each.blocks, set(each.askers)) for each in hot.note_prompt(now, worker, keys)]


def test_what_prompts_of_two_workers_have_in_common_is_hot() -> None:
    hot, other = HotPrefixes(), (*KEYS[:5], *hashes(prompt(64, start=900)))
    assert note(hot, 0.0, "a", KEYS) == []
    assert note(hot, 1.0, "b", other) == [(5, {"a", "b"})]
    assert note(hot, 2.0, "c", KEYS) == [(8, {"a", "c"})]
    assert note(hot, 3.0, "c", hashes(prompt(64, start=500))) == []


def test_what_one_worker_is_asked_for_again_is_hot_and_ten_seconds_later_it_is_not() -> None:
    hot = HotPrefixes()
    note(hot, 0.0, "a", KEYS)
    assert note(hot, 9.5, "a", KEYS) == [(8, {"a"})]
    assert note(hot, 19.5, "a", KEYS) == []
    assert note(hot, 29.0, "b", KEYS) == [(8, {"a", "b"})]
    assert note(hot, 40.0, "c", KEYS) == []


def test_places_and_workers_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "MOST_PLACES", 16)
    hot = HotPrefixes()
    for number in range(20):
        note(hot, float(number), "a", hashes(prompt(64, start=1000 * number)))
    assert len(hot._asked) == 16
    for number in range(9):
        note(hot, 30.0, f"worker-{number}", KEYS)
    assert {len(each) for each in hot._asked.values()} == {1, 4}
    for number in range(40):
        hot.may_copy(30.0, KEYS[0], f"worker-{number}")
    assert len(hot._copied) == 16


def test_a_worker_gets_a_prefix_once_a_minute() -> None:
    hot = HotPrefixes()
    assert hot.may_copy(0.0, KEYS[3], "a")
    assert not hot.may_copy(59.0, KEYS[3], "a")
    assert hot.may_copy(59.0, KEYS[3], "b")
    assert hot.may_copy(59.0, KEYS[4], "a")
    assert hot.may_copy(60.0, KEYS[3], "a")


# ---------------------------------------------------------------- who gets it


def test_of_those_that_were_not_asked_the_one_with_the_least_to_do_gets_it() -> None:
    hot = Hot(4, frozenset("ab"))
    workers = [Standing("a", True, 0, 0), Standing("b", False, 0, 0), Standing("c", False, 1, 0)]
    assert choose_worker(hot, "b", workers) == Choice("c", "prompts at a and b begin with it")
    workers.append(Standing("d", False, 0, 9))
    assert choose_worker(hot, "b", workers) == Choice("d", "prompts at a and b begin with it")
    workers.append(Standing("e", False, 0, 2))
    assert choose_worker(hot, "b", workers) == Choice("e", "prompts at a and b begin with it")
    workers.append(Standing("f", True, 0, 0))
    assert choose_worker(hot, "b", workers) == Choice("e", "prompts at a and b begin with it")
    assert choose_worker(hot, "b", workers[:2]) is None, "those that were asked get it with their prompts"


def test_what_is_stuck_at_its_holder_goes_where_nobody_waits() -> None:
    hot, idle, busy = Hot(4, frozenset("a")), Standing("b", False, 0, 3), Standing("c", False, 1, 0)
    stuck = Standing("a", True, 2, 4)
    assert choose_worker(hot, "a", [stuck, busy, idle]) == Choice(
        "b", "a has it, and prompts wait there that begin with it"
    )
    assert choose_worker(hot, "a", [stuck, busy]) is None
    assert choose_worker(hot, "a", [stuck._replace(waiting=0), idle]) is None
    assert choose_worker(hot, "a", [Standing("a", False, 2, 4), idle]) is None, "it has yet to compute it"


# ---------------------------------------------------------------- the registry


def registry(*workers: str, replicate: bool = True) -> tuple[WorkerRegistry, ManualClock]:
    """Return a manager of workers of which the first one has all blocks of the prompt."""
    clock = ManualClock()
    made = WorkerRegistry(ManagerConfig(watermark=0.0, replicate=replicate), clock, counted_ids(), 1)
    made.transfer_key = KEY
    claims = tuple(CachedBlock(BlockId(n), key, n - 1, 0) for n, key in enumerate(KEYS))
    for number, name in enumerate(workers):
        session = attached(made, replace(attach(name, image_format=FORMAT), host_frames=64))
        made.complete(session, Inventory() if number else Inventory(cached_blocks=claims))
    return made, clock


def test_a_prefix_of_prompts_at_two_workers_comes_to_the_third_from_the_first() -> None:
    made, _ = registry("a", "b", "c")
    assert made.note_prompts("a", [KEYS]) == set()
    assert made.note_prompts("b", [KEYS[:6], ()]) == {"c"}
    batch = made.ledger("c").schedule()
    assert batch is not None
    assert [(each.depth, each.peer and each.peer.worker_id) for each in batch.transfers] == [(n, "a") for n in range(6)]
    assert made.note_prompts("b", [KEYS[:6]]) == set(), "it is on its way"
    (record,) = made.ledger("c").drain_decisions()
    assert (record.chosen, record.reasons) == ("replica: accepted", ("prompts at a and b begin with it",))


def test_a_prefix_whose_holder_has_a_queue_comes_to_a_worker_that_has_none() -> None:
    made, _ = registry("a", "b")
    holder = made.ledger("a")
    for number in range(3):  # the pool of 16 blocks has room for one
        holder.apply_report(Report(reserve=(reserve(number, prompt(14 * 16, start=1000 * number)),)))
        holder.schedule()
    assert len(holder.state.sequences.queue) == 2
    assert made.note_prompts("a", [KEYS[:4]]) == set()
    assert holder.find_run(KEYS, 0, 4) == 4, "in host memory, at least"
    assert made.note_prompts("a", [KEYS[:4]]) == {"b"}


def test_without_the_option_nothing_is_noted() -> None:
    made, _ = registry("a", "b", "c", replicate=False)
    assert made.hot is None
    assert made.note_prompts("a", [KEYS]) == made.note_prompts("b", [KEYS]) == set()
    assert made.ledger("c").pool_counts().ahead == 0


def test_nothing_is_replicated_that_is_there() -> None:
    made, clock = registry("a", "b", "c")
    made.note_prompts("a", [KEYS])
    assert made.note_prompts("b", [KEYS]) == {"c"}
    clock.advance(5.0)
    assert made.note_prompts("a", [KEYS]) == set()
    assert made.ledger("c").pool_counts().ahead == 1


def test_a_worker_that_drains_gets_no_copy_and_the_next_one_does() -> None:
    made, _ = registry("a", "b", "c", "d")
    made.ledger("c").apply_report(Report(draining=True))
    made.note_prompts("a", [KEYS])
    assert made.note_prompts("b", [KEYS]) == {"d"}
    batch = made.ledger("c").schedule()
    assert batch is not None
    assert batch.transfers == ()
    answer = made.wish_prefix("c", KEYS, "an operator asks")
    assert answer == (Outcome.REFUSED, 0, 0, "the worker drains; expected one that takes new requests")
    made.ledger("c").rebuild(Inventory())
    assert made.wish_prefix("c", KEYS, "an operator asks").outcome is Outcome.ACCEPTED, "its next session"
