"""Which workers are priced and named: all of a few; of many the longest hits, and others drawn at random."""

from __future__ import annotations

import random

from common.contracts.types import Candidate
from router.placement.routing import (
    MOST_HOLDERS,
    MOST_NAMED,
    MOST_PRICED,
    named,
    shortlist,
    unnamed,
)
from router.placement.worker_model import Capacity, Load, WorkerModel

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=1024)


def workers(count: int) -> list[WorkerModel]:
    return [WorkerModel(f"w{number}", CAPACITY, Load(), 0.0) for number in range(count)]


def priced(name: str, cost: float, hits: int = 0) -> Candidate:
    return Candidate(name, cost, figures=(("hit_blocks", float(hits)),))


def test_of_a_few_workers_all_are_priced() -> None:
    all_of_them = workers(MOST_PRICED)
    assert shortlist(all_of_them, {}, 1) is all_of_them


def test_of_many_the_longest_hits_are_priced_and_the_rest_is_drawn() -> None:
    many = workers(1000)
    hits = {f"w{number}": number for number in range(500)}
    found = [each.worker_id for each in shortlist(many, hits, 7)]
    assert {f"w{number}" for number in range(500 - MOST_HOLDERS, 500)} <= {*found}
    assert MOST_PRICED - MOST_HOLDERS <= len(found) <= MOST_PRICED
    assert found == sorted(found, key=lambda name: int(name[1:]))
    assert found == [each.worker_id for each in shortlist(many, hits, 7)]
    assert found != [each.worker_id for each in shortlist(many, hits, 8)]


def test_every_worker_is_drawn_now_and_then() -> None:
    many, draw = workers(200), random.Random(0)
    seen = {each.worker_id for _ in range(60) for each in shortlist(many, {}, draw.getrandbits(32))}
    assert len(seen) == 200


def test_a_record_names_the_cheapest_the_chosen_one_and_the_best_holder() -> None:
    found = [priced(f"w{number}", float(number), hits=1) for number in range(30)]
    found[20] = priced("w20", 20.0, hits=9)
    kept = named(found, "w25")
    assert [each.name for each in kept] == [*(f"w{number}" for number in range(MOST_NAMED)), "w20", "w25"]
    assert dict(unnamed(found, kept, 1000)) == {"not_priced": 970.0, "more_dearer": 20.0}


def test_of_those_filtered_out_a_record_names_some_and_counts_the_others_by_reason() -> None:
    full = [Candidate(f"f{number}", rejected="over limit: 9 sequences of at most 8") for number in range(12)]
    gone = [Candidate(f"g{number}", rejected="draining: it finishes what it has") for number in range(3)]
    kept = named([*full, *gone], "wait")
    assert len(kept) == MOST_NAMED
    assert dict(unnamed([*full, *gone], kept, 15)) == {"more_over_limit": 4.0, "more_draining": 3.0}


def test_a_short_record_is_whole() -> None:
    found = [priced(f"w{number}", 1.0) for number in range(MOST_NAMED)]
    assert named(found, "w0") == tuple(found)
    assert dict(unnamed(found, found, MOST_NAMED)) == {}
