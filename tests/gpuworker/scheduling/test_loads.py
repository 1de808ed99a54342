"""For whom blocks are loaded from host memory, what their copies took, and the tokens that count as loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.lease import Admit, GrantBatch, TierCopy
from common.contracts.transfers import Fetched
from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.frame_claims import Loads, find_loads
from gpuworker.scheduling.outcomes import Completion, Loaded
from tests.support.gpuworker.agent_harness import Driver, blocks

ONE, TWO = SequenceId(1), SequenceId(2)
TOKENS = list(range(10))
"""Two full blocks of four slots, and two tokens more."""


def store(block: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame))


def load(frame: int, block: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load=True)


def admission(sequence: int, table: list[int], shared: int) -> Admit:
    return Admit(SequenceId(sequence), blocks(table), shared, 4 * shared)


def with_two_frames_filled() -> Driver:
    """Return a worker that has computed the first two blocks of the tokens, of which frames 0 and 1 have copies."""
    worker = Driver(8, host_frames=2)
    worker.submit(1, TOKENS, max_tokens=1)
    worker.admit(1, [0, 1, 2])
    worker.step()
    worker.submit(2, [70, 71], max_tokens=3)
    orders = (store(0, 0), store(1, 1))
    worker.agent.apply_grant(GrantBatch(0, admit=(admission(2, [3, 4], 0),), tier=orders))
    plan = worker.plan()
    assert (plan.copies, plan.loaded) == (orders, ())
    worker.complete(plan)
    return worker


def finished(worker: Driver) -> Completion:
    plan = worker.plan()
    return worker.agent.complete(StepResult(plan.step, {row.sequence: (50,) for row in plan.rows if row.samples}))


def test_loads_are_found_by_the_places_that_admissions_share() -> None:
    copies = (store(0, 0), load(1, 5), load(2, 6))
    one, two = admission(1, [3, 5, 6, 7], 3), admission(2, [3, 5, 9], 2)
    assert list(find_loads(copies, (one, two))) == [Loads(ONE, 1, 3, 2)], (
        "the second shares a block that is loaded for one"
    )
    assert list(find_loads(copies, (two,))) == [Loads(TWO, 1, 2, 1)]
    assert list(find_loads(copies[:1], (one,))) == []


def test_a_step_says_what_it_loaded_for_whom_and_its_share_of_the_seconds() -> None:
    worker = with_two_frames_filled()
    worker.submit(3, TOKENS, max_tokens=1)
    orders = (load(0, 5), load(1, 6), store(0, 1))
    worker.agent.apply_grant(GrantBatch(0, admit=(admission(3, [5, 6, 7], 2),), tier=orders))
    plan = worker.plan()
    assert plan.loaded == ((SequenceId(3), 2, 2),)
    done = worker.agent.complete(StepResult(plan.step, {row.sequence: (50,) for row in plan.rows}, copy_seconds=0.75))
    assert done.loaded == {SequenceId(3): Loaded(2, 0.5)}, "two of three copies"
    (end,) = [each for each in done.finished if each.sequence == 3]
    assert (end.usage.cached_tokens, end.usage.host_cached_tokens) == (8, 8)
    assert finished(worker).loaded == {}, "the next step has no copies"


def test_only_hits_that_were_loaded_count() -> None:
    worker = with_two_frames_filled()
    worker.submit(3, TOKENS, max_tokens=1)
    worker.agent.apply_grant(GrantBatch(0, admit=(admission(3, [0, 6, 7], 2),), tier=(load(1, 6),)))
    (end,) = [each for each in finished(worker).finished if each.sequence == 3]
    assert (end.usage.cached_tokens, end.usage.host_cached_tokens) == (8, 4)


@pytest.mark.parametrize(("source", "parts"), [("disk", (4, 4, 0)), ("worker-1", (4, 0, 4))])
def test_what_was_fetched_is_counted_by_its_source_and_not_as_host_memory(
    source: str, parts: tuple[int, int, int]
) -> None:
    """Two blocks are loaded, and the second of them had been fetched."""
    worker = with_two_frames_filled()
    worker.submit(3, TOKENS, max_tokens=1)
    admitted = replace(admission(3, [5, 6, 7], 2), fetched=Fetched(1, 2, 0.5, source))
    worker.agent.apply_grant(GrantBatch(0, admit=(admitted,), tier=(load(0, 5), load(1, 6))))
    done = finished(worker)
    (end,) = [each for each in done.finished if each.sequence == 3]
    usage = end.usage
    assert (usage.host_cached_tokens, usage.disk_cached_tokens, usage.peer_cached_tokens) == parts
    assert (usage.cached_tokens, done.loaded) == (8, {SequenceId(3): Loaded(2, 0.0)})


def test_what_another_sequence_has_loaded_is_fetched_for_one_that_waited_too() -> None:
    worker = with_two_frames_filled()
    worker.submit(3, TOKENS, max_tokens=1)
    admitted = replace(admission(3, [0, 1, 7], 2), fetched=Fetched(2, 2, 0.5))
    worker.agent.apply_grant(GrantBatch(0, admit=(admitted,)))
    (end,) = [each for each in finished(worker).finished if each.sequence == 3]
    assert (end.usage.cached_tokens, end.usage.host_cached_tokens, end.usage.disk_cached_tokens) == (8, 0, 8)


def test_what_a_sequence_computed_before_a_preemption_and_loads_after_it_is_no_hit() -> None:
    worker = with_two_frames_filled()
    worker.submit(3, TOKENS, max_tokens=3)
    worker.admit(3, [5, 6, 7])
    finished(worker)
    worker.preempt(3)
    worker.agent.apply_grant(GrantBatch(0, admit=(admission(3, [5, 6, 7], 2),), tier=(load(0, 5), load(1, 6))))
    done = [finished(worker), finished(worker)]
    (end,) = [each for one in done for each in one.finished if each.sequence == 3]
    assert (end.usage.preemptions, end.usage.cached_tokens, end.usage.host_cached_tokens) == (1, 0, 0)
    assert done[0].loaded == {SequenceId(3): Loaded(2, 0.0)}
