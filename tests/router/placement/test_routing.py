"""The choice of a worker: each filter with its reason, ties, the record, and no hot spot."""

from __future__ import annotations

from collections import Counter

import pytest

from common.contracts.clock import ManualClock
from common.contracts.types import Decision, KvGroup, KvGroupKind
from router.placement.placement_request import PlacementOutcome, too_large
from router.placement.routed_prefixes import RoutedPrefixes
from router.placement.routing import TIE_SECONDS, Router
from router.placement.worker_model import Capacity, Load, WorkerModel
from tests.router.placement.test_routed_prefixes import block_hashes
from tests.support.router.placements import CAPACITY, TOKEN, chosen, placement, rejected, router, worker


def test_hits_at_workers_that_have_left_count_for_nothing() -> None:
    found = router().route(placement(), [worker("w0"), worker("w1")], {"gone": 6, "w1": 1})
    assert found.decision.chosen == "w1"
    assert found.hit_blocks == 1


def test_of_many_workers_a_few_with_room_are_found_and_only_those_priced() -> None:
    full = Load(running=2 * CAPACITY.max_num_seqs)
    many = [worker(f"w{number}", full if number % 250 else None) for number in range(1000)]
    found = {router(seed).route(placement(), many, {}).decision.chosen for seed in range(20)}
    assert found == {"w0", "w250", "w500", "w750"}
    without_room = router().route(placement(), [worker(f"w{number}", full) for number in range(1000)], {})
    assert (without_room.outcome, without_room.worker) == (PlacementOutcome.WAIT, None)


# ------------------------------------------------------------ the choice


def test_a_hit_wins_over_an_equal_worker() -> None:
    assert chosen(router().route(placement(), [worker("w0"), worker("w1")], {"w1": 3})) == "w1"


def test_a_long_queue_outweighs_a_hit() -> None:
    busy = worker("w1", Load(unheld_blocks=64, pending_prefill_tokens=50))
    assert chosen(router().route(placement(), [worker("w0"), busy], {"w1": 3})) == "w0"
    assert chosen(router().route(placement(), [worker("w0"), busy], {"w1": 4})) == "w1"


def test_equal_workers_are_taken_by_lot_and_the_lot_can_be_drawn_again() -> None:
    first, again = router(seed=7), router(seed=7)
    workers = [worker(f"w{n}") for n in range(4)]
    picks = [chosen(first.route(placement(), workers, {})) for _ in range(100)]
    assert [chosen(again.route(placement(), workers, {})) for _ in range(100)] == picks
    assert min(Counter(picks).values()) >= 10
    assert set(picks) == {"w0", "w1", "w2", "w3"}


def test_a_difference_below_the_tie_is_none() -> None:
    nearly = worker("w1")
    nearly.rates.prefill_token.value = TOKEN + TIE_SECONDS / 200
    choice = router().route(placement(), [worker("w0"), nearly], {})
    assert dict(choice.decision.figures)["tied"] == 2


# ------------------------------------------------------------ the filters


def test_a_worker_with_twice_its_batch_is_over_limit() -> None:
    choice = router().route(placement(), [worker("w0", Load(running=4, waiting=4, unheld_blocks=64))], {})
    assert choice.outcome is PlacementOutcome.WAIT
    assert rejected(choice) == {"w0": "over limit: 8 sequences of at most 8"}


def test_more_sequences_than_the_limit_fit_an_idle_worker() -> None:
    assert router().route(placement(sequences=20), [worker("w0")], {}).outcome is PlacementOutcome.PLACED


def test_a_request_larger_than_every_pool_is_refused_with_the_numbers() -> None:
    small = worker("w0", capacity=Capacity(num_blocks=8, block_size=16, max_num_seqs=4, max_model_len=4096))
    choice = router().route(placement(prompt=120, output=20), [small], {})
    assert choice.outcome is PlacementOutcome.TOO_LARGE
    assert rejected(choice) == {"w0": "too large: 9 blocks of 8 in its pool"}


def test_a_request_whose_last_token_alone_is_beyond_the_pool_is_placed() -> None:
    small = worker("w0", capacity=Capacity(num_blocks=8, block_size=16, max_num_seqs=4, max_model_len=4096))
    assert router().route(placement(prompt=120, output=9), [small], {}).outcome is PlacementOutcome.PLACED
    assert router().route(placement(prompt=120, output=10), [small], {}).outcome is PlacementOutcome.TOO_LARGE


def test_a_request_longer_than_the_context_is_refused_with_the_numbers() -> None:
    choice = router().route(placement(prompt=500, output=20), [worker("w0")], {})
    assert choice.outcome is PlacementOutcome.TOO_LARGE
    assert rejected(choice) == {"w0": "too large: 520 tokens of at most 512"}


@pytest.mark.parametrize(
    ("num_blocks", "window", "reason"),
    [
        (6, 8, ""),
        (4, 8, ""),
        (3, 8, "too large: 4 blocks of 3 in its pool"),
        (6, 0, "too large: 27 blocks of 6 in its pool"),
    ],
)
def test_with_a_window_the_blocks_that_a_request_holds_at_once_must_fit(
    num_blocks: int, window: int, reason: str
) -> None:
    """The window's 8 slots stand in 4 blocks at most: two before the next position, its own, and the next one."""
    capacity = Capacity(num_blocks, block_size=4, max_num_seqs=4, max_model_len=512, window=window)
    assert too_large(capacity, placement(prompt=100, output=8)) == reason
    found = router().route(placement(prompt=100, output=8), [worker("w0", capacity=capacity)], {})
    assert found.outcome is (PlacementOutcome.TOO_LARGE if reason else PlacementOutcome.PLACED)


@pytest.mark.parametrize(("num_blocks", "reason"), [(66, ""), (65, "too large: 66 pages of 65 in its pool")])
def test_with_groups_the_pages_of_all_groups_must_fit(num_blocks: int, reason: str) -> None:
    """27 blocks of two pages of the full layers, and 4 blocks of three pages of the window."""
    groups = (KvGroup(KvGroupKind.FULL, 0, 2, (0,)), KvGroup(KvGroupKind.WINDOW, 8, 3, (1,)))
    capacity = Capacity(num_blocks, block_size=4, max_num_seqs=4, max_model_len=512, groups=groups)
    assert too_large(capacity, placement(prompt=100, output=8)) == reason


def test_a_larger_worker_that_is_busy_is_waited_for() -> None:
    small = worker("small", capacity=Capacity(num_blocks=4, block_size=16, max_num_seqs=4, max_model_len=512))
    busy = worker("busy", Load(running=8, unheld_blocks=64))
    assert router().route(placement(), [small, busy], {}).outcome is PlacementOutcome.WAIT


def test_draining_and_hung_workers_are_left_out_with_their_reasons() -> None:
    draining = worker("draining", Load(unheld_blocks=64, draining=True))
    hung = worker("hung", Load(unheld_blocks=64, step_age_seconds=12.0, step_predicted_seconds=0.01))
    choice = router().route(placement(), [draining, hung], {}, absent=[("lost", "connecting: refused")])
    assert choice.outcome is PlacementOutcome.NO_WORKER
    assert rejected(choice) == {
        "lost": "connecting: refused",
        "draining": "draining: it finishes what it has and takes nothing new",
        "hung": "hung: its step runs for 12.0 s; at most 5.0 s expected",
    }


# ------------------------------------------------------------ the record


def test_the_record_has_every_candidate_and_the_age_of_each_signal() -> None:
    clock = ManualClock(3.0)
    late = Router(clock, lambda: "d1", seed=5)
    old, new = worker("w0"), worker("w1")
    new.heartbeat(Load(unheld_blocks=64), now=2.5)
    record: Decision = late.route(placement(), [old, new], {"w1": 2}).decision
    assert (record.decision_id, record.chosen, record.request_id) == ("d1", "w1", "r")
    assert [candidate.name for candidate in record.candidates] == ["w0", "w1"]
    assert all(candidate.cost is not None for candidate in record.candidates)
    assert dict(record.signal_ages) == {
        "w0.heartbeat": 3.0,
        "w0.rates": 3.0,
        "w1.heartbeat": 0.5,
        "w1.rates": 3.0,
    }
    assert dict(record.figures) == {"prompt_tokens": 100.0, "tied": 1.0, "seed": 5.0}


def test_a_candidates_terms_sum_to_its_cost() -> None:
    choice = router().route(placement(), [worker("w0", Load(running=3, unheld_blocks=9))], {"w0": 1})
    (candidate,) = choice.decision.candidates
    assert candidate.cost == pytest.approx(sum(value for _, value in candidate.terms))


# ------------------------------------------------------------ no hot spot


def test_a_thousand_requests_with_one_prefix_do_not_pile_up_on_one_worker() -> None:
    """Requests come faster than a worker serves them; all share 6 of their 7 blocks, remembered optimistically."""
    capacity = Capacity(num_blocks=4096, block_size=16, max_num_seqs=64, max_model_len=512)
    workers = [worker(f"w{n}", capacity=capacity) for n in range(4)]
    memory, choose, served = RoutedPrefixes(), router(), Counter[str]()
    running: list[WorkerModel] = []
    for number in range(1000):
        keys = block_hashes("shared" + chr(ord("A") + number % 26))
        hits = memory.lookup(keys, now=0.0)
        choice = choose.route(placement(prompt=113), workers, hits)
        while choice.worker is None:
            running.pop(0).placed(sequences=-1, prefill_tokens=-113 + 96, blocks=-8)
            choice = choose.route(placement(prompt=113), workers, hits)
        choice.worker.placed(sequences=1, prefill_tokens=113 - 96, blocks=8)
        memory.remember(choice.worker.worker_id, keys, now=0.0)
        running.append(choice.worker)
        served[choice.worker.worker_id] += 1
    assert sum(served.values()) == 1000
    assert min(served.values()) >= 200
    assert max(served.values()) <= 300


def test_a_quiet_trickle_with_one_prefix_stays_on_one_worker() -> None:
    workers = [worker(f"w{n}") for n in range(4)]
    memory, choose, served = RoutedPrefixes(), router(), Counter[str]()
    for _ in range(50):
        keys = block_hashes("shared")
        choice = choose.route(placement(prompt=100), workers, memory.lookup(keys, now=0.0))
        memory.remember(chosen(choice), keys, now=0.0)
        served[chosen(choice)] += 1
    assert len(served) == 1


def test_without_any_worker_nothing_is_chosen() -> None:
    choice = router().route(placement(), [], {})
    assert (choice.outcome, choice.worker, choice.decision.chosen) == (PlacementOutcome.NO_WORKER, None, "no_worker")
