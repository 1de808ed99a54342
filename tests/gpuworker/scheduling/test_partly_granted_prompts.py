"""A prompt that was granted in part leaves decodes a part of their runway, and takes the rest of the pool."""

from __future__ import annotations

from common.contracts.lease import GrantBatch
from tests.support.gpuworker.agent_harness import Driver, blocks


def decode_and_prompt(pool: int, **config: int) -> Driver:
    """Return a worker with a decode of 4 tokens that may reach 28, a prompt of 20 with one of 5 blocks, and a pool."""
    worker = Driver(16, 4, lease_target=8, runway_slots=16, **config)
    worker.submit(1, range(4), max_tokens=24)
    worker.admit(1, [0])
    plan = worker.agent.plan()
    assert plan is not None
    worker.submit(2, range(50, 70), max_tokens=4)
    worker.admit(2, [1])
    worker.agent.apply_grant(GrantBatch(8, lease=blocks(list(range(8, 8 + pool)))))
    return worker


def lengths(worker: Driver) -> dict[int, int]:
    plan = worker.agent.plan()
    return {row.sequence: row.length for row in plan.rows} if plan is not None else {}


def test_it_takes_what_decodes_do_not_need_soon() -> None:
    worker = decode_and_prompt(pool=4)
    # The decode binds one of four blocks, and will bind four more within 16 slots. A third of these is two.
    assert lengths(worker) == {1: 1, 2: 4 + 4}
    assert worker.agent.counts().pool == 2


def test_it_takes_all_where_every_layer_has_a_window() -> None:
    worker = decode_and_prompt(pool=4, window=64)
    assert lengths(worker) == {1: 1, 2: 4 + 3 * 4}


def test_it_waits_with_its_step_done_and_goes_on_once_there_are_blocks() -> None:
    worker = decode_and_prompt(pool=2)
    assert lengths(worker) == {1: 1, 2: 4}
    assert worker.agent.counts().pool == 1, "it is kept for the decode"
    first, second = worker.agent._in_flight
    worker.complete(first)
    worker.complete(second)
    assert lengths(worker) == {1: 1}
    assert worker.agent.counts().stalled == 1
    worker.lease([10, 11, 12, 13])
    assert lengths(worker) == {1: 1, 2: 12}
    worker.agent.check_invariants()
