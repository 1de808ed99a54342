"""What is believed of a worker between heartbeats, and when it is hung."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.types import KvGroup, KvGroupKind
from router.placement.worker_model import Capacity, Load, WorkerModel, WorkerState

CAPACITY = Capacity(num_blocks=100, block_size=16, max_num_seqs=8, max_model_len=1024)


def _loaded(load: Load) -> WorkerModel:
    return WorkerModel("w0", CAPACITY, load, heartbeat_at=0.0)


def test_what_was_placed_since_the_heartbeat_is_added_to_it() -> None:
    model = _loaded(Load(running=2, waiting=1, unheld_blocks=50, pending_prefill_tokens=100))
    model.placed(sequences=1, prefill_tokens=30, blocks=2)
    assert (model.sequences, model.pending_prefill_tokens, model.unheld_blocks) == (4, 130, 48)


def test_a_heartbeat_replaces_what_was_estimated() -> None:
    model = _loaded(Load(running=1, unheld_blocks=50))
    model.placed(sequences=1, prefill_tokens=30, blocks=2)
    model.heartbeat(Load(running=5, unheld_blocks=40, pending_prefill_tokens=60), now=0.5)
    assert (model.sequences, model.pending_prefill_tokens, model.unheld_blocks) == (5, 60, 40)
    assert model.unplanned_prefill_tokens == 60
    model.heartbeat(Load(running=5, unheld_blocks=40, pending_prefill_tokens=60, prefill_tokens_in_flight=50), now=0.6)
    assert model.unplanned_prefill_tokens == 10
    model.heartbeat(Load(running=5, unheld_blocks=40, pending_prefill_tokens=60, prefill_tokens_in_flight=99), now=0.7)
    assert model.unplanned_prefill_tokens == 0, "a worker that contradicts itself"


def test_a_submit_that_crossed_a_heartbeat_still_counts() -> None:
    model = _loaded(Load())
    model.placed(sequences=3, prefill_tokens=90, blocks=6)
    model.heartbeat(Load(), now=0.5)
    assert (model.sequences, model.pending_prefill_tokens) == (3, 90)


def test_what_left_is_taken_back() -> None:
    model = _loaded(Load(running=4, unheld_blocks=50))
    model.placed(sequences=1, prefill_tokens=30, blocks=2)
    model.placed(sequences=-1, prefill_tokens=-30, blocks=-2)
    assert (model.sequences, model.pending_prefill_tokens, model.unheld_blocks) == (4, 0, 50)
    assert model.outstanding == 0


def test_rates_are_learnt_from_heartbeats_that_have_some() -> None:
    model = _loaded(Load())
    model.heartbeat(Load(running=1), now=0.5)
    assert model.rates.step.predict(1) is None
    model.heartbeat(Load(running=1, decode_step_seconds=0.01, prefill_seconds_per_token=0.001), now=1.0)
    assert model.rates.step.predict(1) == 0.01
    assert model.rates.prefill_token.value == 0.001


def test_a_step_is_hung_after_ten_times_its_prediction() -> None:
    assert _loaded(Load(step_age_seconds=9.9, step_predicted_seconds=1.0)).trouble(0.0) is None
    trouble = _loaded(Load(step_age_seconds=10.1, step_predicted_seconds=1.0)).trouble(0.0)
    assert trouble == (WorkerState.HUNG, "its step runs for 10.1 s; at most 10.0 s expected")


def test_a_short_step_is_hung_only_after_five_seconds() -> None:
    assert _loaded(Load(step_age_seconds=5.0, step_predicted_seconds=0.01)).trouble(0.0) is None
    assert _loaded(Load(step_age_seconds=5.1, step_predicted_seconds=0.01)).trouble(0.0) is not None


def test_a_step_that_cannot_be_predicted_yet_has_a_minute() -> None:
    assert _loaded(Load(step_age_seconds=59.0)).trouble(0.0) is None
    assert _loaded(Load(step_age_seconds=61.0)).trouble(0.0) is not None


def test_a_silent_worker_is_hung() -> None:
    model = _loaded(Load(running=1))
    assert model.trouble(5.0) is None
    assert model.trouble(5.5) == (WorkerState.HUNG, "no heartbeat for 5.5 s")


def test_an_idle_worker_may_be_silent_for_longer_and_work_leaves_it_as_much_time() -> None:
    model = _loaded(Load())
    model.placed(sequences=1, prefill_tokens=3, blocks=1)
    assert model.trouble(8.4) is None
    assert model.trouble(8.5) == (WorkerState.HUNG, "no heartbeat for 8.5 s")


def test_a_worker_from_which_everything_was_taken_stays_silent() -> None:
    model = _loaded(Load(running=1))
    model.placed(sequences=1, prefill_tokens=3, blocks=1)
    model.placed(sequences=-1, prefill_tokens=-3, blocks=-1)
    assert model.trouble(5.5) == (WorkerState.HUNG, "no heartbeat for 5.5 s")


def test_time_in_which_the_router_was_stopped_does_not_age_a_heartbeat() -> None:
    model = _loaded(Load(running=1))
    model.router_paused(3.0, now=8.0)
    assert model.trouble(8.0) is None
    assert model.trouble(8.5) == (WorkerState.HUNG, "no heartbeat for 5.5 s")
    model.router_paused(90.0, now=9.0)
    assert model.heartbeat_at == 9.0


def test_a_draining_worker_takes_nothing_new() -> None:
    trouble = _loaded(Load(draining=True)).trouble(0.0)
    assert trouble is not None
    assert trouble[0] is WorkerState.DRAINING


def test_a_worker_without_a_manager_is_trusted_for_a_while() -> None:
    model = WorkerModel("w0", CAPACITY, Load(), heartbeat_at=0.0, manager_patience=4.0)
    alone = Load(manager_attached=False)
    model.heartbeat(alone, 1.0)
    model.heartbeat(alone, 4.0)
    assert model.trouble(4.9) is None
    trouble = model.trouble(5.0)
    assert trouble is not None
    assert (trouble[0], "no KV manager for 4 s (--manager-patience)" in trouble[1]) == (WorkerState.DETACHED, True)
    model.router_paused(2.0, 6.0)
    assert model.trouble(6.9) is None, "the router did not run, and a heartbeat of that time is unread"
    assert model.trouble(7.0) is not None
    model.heartbeat(Load(), 8.0)
    assert model.trouble(8.0) is None
    model.heartbeat(alone, 9.0)
    assert model.trouble(12.0) is None, "the time of the first loss counts no more"


@pytest.mark.parametrize(
    ("window", "tokens", "hit_blocks", "fresh"),
    [(0, 160, 4, 6), (0, 160, 10, 0), (32, 1600, 0, 4), (32, 1600, 1, 3), (32, 1600, 50, 2), (32, 808, 50, 1)],
)
def test_hits_that_left_the_window_hold_no_block(window: int, tokens: int, hit_blocks: int, fresh: int) -> None:
    """A window of 32 needs two blocks of 16 before the next token, and two more."""
    assert replace(CAPACITY, window=window).fresh_blocks(tokens, hit_blocks) == fresh


def paged(*runs: KvGroup) -> Capacity:
    """Return a pool with blocks of 4, of which one of the full layers is two pages."""
    full = KvGroup(KvGroupKind.FULL, 0, 2, (0, 3))
    return Capacity(num_blocks=100, block_size=4, max_num_seqs=8, max_model_len=1024, groups=(full, *runs))


WINDOW = KvGroup(KvGroupKind.WINDOW, 8, 3, (1,))
CHUNK = KvGroup(KvGroupKind.CHUNK, 12, 1, (2,))


@pytest.mark.parametrize(
    ("capacity", "tokens", "pages"),
    [
        (paged(WINDOW), 16, 4 * 2 + 4 * 3),
        (paged(WINDOW), 17, 5 * 2 + 4 * 3),
        (paged(WINDOW), 100, 25 * 2 + 4 * 3),
        (paged(CHUNK), 100, 25 * 2 + 5 * 1),
        (paged(WINDOW, CHUNK), 100, 25 * 2 + 4 * 3 + 5 * 1),
    ],
)
def test_with_groups_a_sequence_holds_pages_of_each(capacity: Capacity, tokens: int, pages: int) -> None:
    """A window of 8 stands in 4 blocks of 4 at most, a chunk of 12 in 5."""
    assert capacity.blocks(tokens, tokens) == pages
    assert capacity.fresh_blocks(tokens, 0) == pages
    assert capacity.unit == "pages"


@pytest.mark.parametrize(
    ("capacity", "tokens", "hit_blocks", "pages"),
    [
        (paged(WINDOW), 100, 1, 24 * 2 + 3 * 3),
        (paged(WINDOW), 100, 10, 15 * 2 + 2 * 3),
        (paged(WINDOW), 44, 10, 1 * 2 + 1 * 3),
        (paged(WINDOW), 40, 10, 0),
        (paged(CHUNK), 100, 9, 16 * 2 + 5 * 1),
        (paged(CHUNK), 100, 10, 15 * 2 + 4 * 1),
        (paged(WINDOW, CHUNK), 100, 10, 15 * 2 + 2 * 3 + 4 * 1),
    ],
)
def test_with_groups_hits_hold_the_pages_that_are_still_read(
    capacity: Capacity, tokens: int, hit_blocks: int, pages: int
) -> None:
    """At block 10 a window of 8 reads two blocks, and a chunk of 12 one; at block 9 a chunk begins."""
    assert capacity.fresh_blocks(tokens, hit_blocks) == pages


@pytest.mark.parametrize(
    ("capacity", "tokens", "hit_blocks", "shares", "pages"),
    [
        (paged(WINDOW), 15, 0, 3, 1 * 2 + 1 * 3),
        (paged(WINDOW), 102, 0, 4, 22 * 2 + 2 * 3),
        (paged(WINDOW), 102, 1, 4, 22 * 2 + 2 * 3),
        (paged(WINDOW), 102, 10, 10, 16 * 2 + 2 * 3),
        (paged(CHUNK), 102, 0, 5, 21 * 2 + 3 * 1),
        (paged(CHUNK), 102, 3, 3, 23 * 2 + 5 * 1),
        (paged(WINDOW, CHUNK), 102, 0, 4, 22 * 2 + 2 * 3 + 4 * 1),
    ],
)
def test_with_groups_a_fork_shares_what_no_window_left_and_copies_nothing(
    capacity: Capacity, tokens: int, hit_blocks: int, shares: int, pages: int
) -> None:
    """It computes all tokens behind the blocks that it shares, those of a partial last block too."""
    assert capacity.fork_shares(tokens, hit_blocks) == shares
    assert capacity.fork_load(tokens, hit_blocks) == (tokens - 4 * shares, pages)


@pytest.mark.parametrize("window", [0, 1, 8, 11])
@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 60])
def test_a_group_of_all_layers_is_a_pool_without_groups(window: int, tokens: int) -> None:
    """With pages as large as blocks; then blocks of one group are counted as those of the pool."""
    kind = KvGroupKind.WINDOW if window else KvGroupKind.FULL
    plain = Capacity(100, 4, 8, 1024, window)
    one = replace(plain, window=0, groups=(KvGroup(kind, window, 1, (0, 1)),))
    assert one.blocks(tokens, tokens) == plain.blocks(tokens, tokens)
    for hits in range((tokens - 1) // 4 + 1):
        assert one.fresh_blocks(tokens, hits) == plain.fresh_blocks(tokens, hits)
        assert one.fork_shares(tokens, hits) == plain.fork_shares(tokens, hits)
